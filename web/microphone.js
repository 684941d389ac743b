// A microphone that only listens for somebody speaking up. What it hears goes nowhere: no recording, no network.

import { VivavoceError } from "./errors.js";

/** Ask for it in a click: the browser asks the user. */
export class Microphone {
  /** Somebody begins to speak. @type {() => void} */
  onspeech = () => {};
  /** The device is gone. @type {() => void} */
  onlost = () => {};
  /** Loudness, RMS from 0 to 1. */
  level = 0;
  speaking = false;

  /** @type {MediaStream | null} */
  #stream = null;
  /** @type {AudioContext | null} */
  #context = null;

  get on() {
    return this.#stream !== null;
  }

  /** @throws {VivavoceError} `microphone-refused` */
  async start() {
    let stream;
    try {
      // Echo cancellation takes the voice that comes out of this page's own loudspeaker for what it is.
      stream = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: true, noiseSuppression: true, autoGainControl: false } });
    } catch (cause) {
      throw new VivavoceError("microphone-refused", "There is no microphone for this page.", {
        remedy: "Plug one in, or allow it in the browser's settings for this site. Everything else works without.",
        cause,
      });
    }
    this.#stream = stream;
    const [track] = stream.getAudioTracks();
    track.addEventListener("ended", () => {
      this.stop();
      this.onlost();
    });
    const context = (this.#context = new AudioContext({ sampleRate: 48000 }));
    await context.audioWorklet.addModule(new URL("./vad-worklet.js", import.meta.url));
    if (this.#context !== context) return; // stopped meanwhile
    const node = new AudioWorkletNode(context, "vivavoce-vad", { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" });
    node.port.onmessage = ({ data: { rms, changed, speaking } }) => {
      this.level = rms;
      this.speaking = speaking;
      if (changed && speaking && this.#context === context) this.onspeech();
    };
    context.createMediaStreamSource(stream).connect(node);
  }

  stop() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    this.#context?.close();
    this.#stream = this.#context = null;
    this.level = 0;
    this.speaking = false;
  }
}
