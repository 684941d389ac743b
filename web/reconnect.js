// Trying again, for as long as the gateway keeps a session whose client has gone.

const FOR_MS = 30_000; // the gateway's resume_s, unless it was set otherwise
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2000;

/** Calls `attempt` until it succeeds, gives up by a reason, or time is over; then throws what it threw last.
 * @param {() => Promise<void>} attempt @param {(error: any) => boolean} hopeless whether another attempt would fail, too
 * @param {AbortSignal} signal */
export async function persist(attempt, hopeless, signal) {
  const until = performance.now() + FOR_MS;
  for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS)) {
    try {
      return await attempt();
    } catch (error) {
      if (signal.aborted || hopeless(error) || performance.now() + pauseMs > until) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    if (signal.aborted) throw signal.reason;
  }
}
