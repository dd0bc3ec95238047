/** The JSON API, the live overview, and the hooks that keep pages up to date. */

import { useEffect, useRef, useState } from "./preact.js";
import { noteServerTime } from "./format.js";

const PATIENCE = 20_000; // milliseconds that a request may take
const GENTLE = 50; // a page asks again after that many times the length of its last answer

/** The folder of the page; without the user and password that may stand in its address. */
const API = new URL("api/", location.origin + location.pathname);

/** Why a call failed. `status` is 0 if the dashboard itself did not answer. */
class ApiError extends Error {
  constructor(status, text, body = {}) {
    super(text);
    this.status = status;
    this.body = body;
    this.passes = status === 0 || status === 502 || status === 503 || status === 504;
  }
}

/** Return "a=1&b=2&b=3", without what is empty. */
export function toQuery(values) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    for (const one of [value].flat()) if (one !== "" && one != null) query.append(key, one);
  }
  return query.toString();
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(API + path, { signal: AbortSignal.timeout(PATIENCE), ...options });
  } catch (error) {
    const late = error.name === "TimeoutError";
    throw new ApiError(0, `the dashboard ${late ? "is too slow" : "does not answer"}`);
  }
  const body = await response.json().catch(() => null);
  if (response.ok && body) return body;
  const text = response.status === 401 ? "signed out; load the page again" : body?.error;
  throw new ApiError(response.status, text || `unexpected answer (HTTP ${response.status})`, body);
}

export const get = (path, values = {}) => call(`${path}?${toQuery(values)}`);

export function post(path, values = {}) {
  const token = /(?:^|; )machinery_csrf=([^;]*)/.exec(document.cookie)?.[1] || "";
  return call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-CSRF-Token": token },
    body: JSON.stringify(values),
  });
}

// The live overview, shared by all parts of the page

const listeners = new Set();
const live = { overview: null, error: null, how: "connecting" };
let stream = null;
let timer = 0;
let polls = 0;

function publish(change) {
  Object.assign(live, change);
  for (const listener of listeners) listener({ ...live });
}

function receive(overview, how) {
  noteServerTime(overview.at);
  publish({ overview, how, error: null });
}

function stop() {
  stream?.close();
  clearTimeout(timer);
}

/** Follow the stream; fall back to polling where there is none, and try it again now and then. */
function follow() {
  stop();
  if (document.hidden) return;
  polls = 0;
  stream = new EventSource(`${API}live`);
  const quiet = () => {
    clearTimeout(timer);
    timer = setTimeout(poll, 8000);
  };
  stream.onmessage = (event) => {
    quiet();
    receive(JSON.parse(event.data), "live");
  };
  // One that ended is opened again by the browser; one that was refused stays closed.
  stream.onerror = () => stream.readyState === EventSource.CLOSED && poll();
  quiet();
}

async function poll() {
  stop();
  if (document.hidden) return;
  try {
    receive(await get("overview"), "polling");
  } catch (error) {
    publish({ error, how: "away" });
  }
  polls += 1;
  stop();
  timer = setTimeout(live.how === "away" || polls % 5 ? poll : follow, 2000);
}

export function startLive() {
  document.addEventListener("visibilitychange", follow);
  follow();
}

export function useLive() {
  const [value, set] = useState(live);
  useEffect(() => {
    listeners.add(set);
    set({ ...live });
    return () => listeners.delete(set);
  }, []);
  return value;
}

/** Say whether buttons that change something are shown: not until it is known that they may. */
export const useMayChange = () => useLive().overview?.read_only === false;

/**
 * Ask again and again while the page is seen. Old data stay while the store is away.
 * Returns { data, error, refresh }; data is null until the first answer to these values.
 */
export function useData(path, values = {}, every = 3) {
  const key = `${path}?${toQuery(values)}`;
  const [got, set] = useState({ key, data: null, error: null });
  const refresh = useRef(() => {});
  useEffect(() => {
    let timer = 0;
    let newest = 0;
    const load = async () => {
      clearTimeout(timer);
      const [mine, start] = [++newest, performance.now()];
      let change = null;
      if (!document.hidden) {
        change = await get(path, values).then(
          (data) => ({ data, error: null }),
          (error) => ({ error }),
        );
      }
      if (mine !== newest) return;
      if (change) set((old) => ({ data: old.key === key ? old.data : null, ...change, key }));
      const wait = Math.max(every * 1000, GENTLE * (performance.now() - start));
      timer = setTimeout(load, Math.min(wait, 60_000));
    };
    refresh.current = load;
    load();
    document.addEventListener("visibilitychange", load);
    return () => {
      newest = -1;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", load);
    };
  }, [key]);
  const fresh = got.key === key;
  return {
    data: fresh ? got.data : null,
    error: fresh ? got.error : null,
    refresh: () => refresh.current(),
  };
}
