// SPDX-License-Identifier: Apache-2.0
// Asks the sidecar again and again: not while nobody looks, and less often while it does not answer.

const TOKEN_KEY = "vllm-kvfix-token";
const PATIENCE_MS = 10_000;
const LONGEST_WAIT_S = 30;

class FeedError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function useToken(token) {
  sessionStorage.setItem(TOKEN_KEY, token);
}

export function hasToken() {
  return sessionStorage.getItem(TOKEN_KEY) !== null;
}

/** The JSON at a path; throws a FeedError with words for a person. */
export async function ask(path, signal) {
  const headers = { Accept: "application/json" };
  const token = sessionStorage.getItem(TOKEN_KEY);
  if (token) headers.Authorization = `Bearer ${token}`;
  let answer;
  try {
    answer = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    throw new FeedError(error.name === "TimeoutError" ? "it took too long" : "it cannot be reached");
  }
  let body;
  try {
    body = await answer.json();
  } catch {
    throw new FeedError(answer.ok ? "what came is no JSON" : `it answered ${answer.status}`, answer.status);
  }
  if (!answer.ok) throw new FeedError(String(body?.error ?? `it answered ${answer.status}`), answer.status);
  if (typeof body !== "object" || body === null) throw new FeedError("what came is no object", answer.status);
  if (body.schema_version !== 1) {
    throw new FeedError("it speaks another version of this interface: reload the page", answer.status);
  }
  return body;
}

/**
 * One path that is asked at an interval.
 *
 * path(): where, null: nothing to ask now. every(): seconds. got(body), failed(error, seconds until the next try).
 */
export class Poll {
  constructor({ path, every, got, failed }) {
    Object.assign(this, { path, every, got, failed });
    this.failures = 0;
    this.running = false;
    this.timer = 0;
    this.abort = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.soon()));
  }

  start() {
    this.running = true;
    this.soon();
  }

  stop() {
    this.running = false;
    this.rest();
  }

  rest() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  /** Ask at once, and go on from there. */
  soon() {
    this.rest();
    if (this.running && !document.hidden) this.turn();
  }

  async turn() {
    const mine = (this.abort = new AbortController());
    const patience = AbortSignal.timeout(PATIENCE_MS);
    const onTimeout = () => mine.abort(patience.reason);
    patience.addEventListener("abort", onTimeout);
    let wait = this.every();
    try {
      const path = this.path();
      if (path !== null) {
        const body = await ask(path, mine.signal);
        if (this.abort !== mine) return;
        this.failures = 0;
        this.got(body);
      }
    } catch (error) {
      if (this.abort !== mine) return; // somebody else asks by now
      this.failures += 1;
      wait = Math.min(LONGEST_WAIT_S, Math.max(wait, 1) * 2 ** Math.min(this.failures - 1, 5));
      if (!(error instanceof FeedError)) console.error(error);
      this.failed(error, wait);
    } finally {
      patience.removeEventListener("abort", onTimeout);
    }
    this.timer = setTimeout(() => this.turn(), wait * 1000);
  }
}
