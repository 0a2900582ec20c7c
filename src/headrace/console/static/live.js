// Repeating, as long as a page is open and somebody sees it.

const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(done, ms);
    function done() {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    }
    signal.addEventListener("abort", done);
  });

const seen = (signal) =>
  new Promise((resolve) => {
    if (!document.hidden) return resolve();
    const stop = new AbortController();
    const done = () => {
      stop.abort();
      resolve();
    };
    document.addEventListener("visibilitychange", () => document.hidden || done(), { signal: stop.signal });
    signal.addEventListener("abort", done, { signal: stop.signal });
  });

/**
 * Call `work` now and again `ms` after it has ended, until the signal. What fails is tried again, unless asking again
 * cannot help (a deleted topic, a missing right): then `fail` is called, and it ends.
 */
export async function every(ms, signal, work, fail = () => {}) {
  while (!signal.aborted) {
    await seen(signal);
    if (signal.aborted) return;
    try {
      await work();
    } catch (error) {
      if (error.status >= 400 && error.status < 500 && error.status !== 429) {
        if (!signal.aborted) fail(error);
        return;
      }
      if (!("status" in error) && error.name !== "AbortError") console.error(error);
    }
    await pause(ms, signal);
  }
}
