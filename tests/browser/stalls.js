// Did this browser stand still? Told by clocks that know nothing of the page: a worker's, for the page's process, and for its sound that of its
// own audio context, which stays behind for good if its output was late. `await standstill()`: by how many milliseconds at most, since
// `standstill.reset()`.
(() => {
  if (window !== top) return;
  const WINDOW = 10; // looks, 20 ms apart; a context's time moves in steps of 10 ms
  const ticker = `
    const TICK_MS = 5;
    let before = performance.now(), longest = 0;
    setInterval(() => {
      const now = performance.now();
      longest = Math.max(longest, now - before - TICK_MS);
      before = now;
    }, TICK_MS);
    onmessage = ({ data }) => {
      if (data === "reset") longest = 0;
      else postMessage(longest);
    };`;
  const worker = new Worker(URL.createObjectURL(new Blob([ticker], { type: "text/javascript" })));
  let context = null;
  let looks = [];
  let least = Infinity; // behind the page's clock, of the window before
  let lost = 0;
  window.AudioContext = class extends AudioContext {
    constructor(...given) {
      super(...given);
      [context, looks, least] = [this, [], Infinity];
    }
  };
  setInterval(() => {
    if (context?.state !== "running" || !context.currentTime) return;
    looks.push(performance.now() - context.currentTime * 1000);
    if (looks.length < WINDOW) return;
    const now = Math.min(...looks);
    lost = Math.max(lost, now - least);
    [looks, least] = [[], now];
  }, 20);
  window.standstill = () =>
    new Promise((resolve) => {
      worker.onmessage = ({ data }) => resolve({ process: data, context: lost });
      worker.postMessage("tell");
    });
  window.standstill.reset = () => {
    lost = 0;
    worker.postMessage("reset");
  };
})();
