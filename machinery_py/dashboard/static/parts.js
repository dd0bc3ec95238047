/** Pieces that several pages are made of: states, times, messages, dialogs. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "./preact.js";
import { toQuery } from "./api.js";
import { exact, moment, number, relative } from "./format.js";

/** Return the address of a page: link("tasks", {state: ["FAILURE"]}). */
export function link(page, values = {}) {
  const query = toQuery(values);
  return `#/${page}${query ? `?${query}` : ""}`;
}

export const remember = (key, value) => {
  try {
    localStorage.setItem(`machinery.${key}`, value);
  } catch {
    // Storage is switched off: the choice holds until the page is loaded again.
  }
};

export const remembered = (key) => {
  try {
    return localStorage.getItem(`machinery.${key}`);
  } catch {
    return null;
  }
};

export const STATES = ["PENDING", "RECEIVED", "STARTED", "RETRY", "SUCCESS", "FAILURE"];
export const isFinished = (state) => state === "SUCCESS" || state === "FAILURE";
const WORDS = Object.fromEntries(STATES.map((one) => [one, one[0] + one.slice(1).toLowerCase()]));
export const stateWord = (state) => WORDS[state] || state;

export const State = ({ of }) =>
  html`<span class="state is-${of.toLowerCase()}">${stateWord(of)}</span>`;

export const Progress = ({ of: [done, total] }) =>
  html`<progress aria-label="Progress" max=${total || 1} value=${done}></progress>
    ${number(done)} of ${number(total)}`;

// One clock for all relative times of the page

const clocks = new Set();
setInterval(() => document.hidden || clocks.forEach((tick) => tick(Date.now())), 1000);

/** A moment as "3 min ago", with the exact one in its title. */
export function Time({ at, none = "–" }) {
  const [, tick] = useState(0);
  useEffect(() => {
    clocks.add(tick);
    return () => clocks.delete(tick);
  }, []);
  if (moment(at) === null) return none;
  return html`<time datetime=${at} title=${exact(at)}>${relative(at)}</time>`;
}

// Short messages at the foot of the page

let showMessage = () => {};

/** Say how an action ended. Screen readers hear it; it goes away by itself. */
export const say = (text, failed = false) => showMessage({ text, failed });

export function Messages() {
  const [message, set] = useState(null);
  showMessage = set;
  useEffect(() => {
    const timer = setTimeout(() => set(null), message?.failed ? 12_000 : 5000);
    return () => clearTimeout(timer);
  }, [message]);
  return html`<div class="messages" role="status">
    ${message && html`<p class=${message.failed ? "failed" : ""}>${message.text}</p>`}
  </div>`;
}

/** A button that cannot be pressed twice while its action runs; says how the action ended. */
export function Action({ run, done, onDone, label, children, kind = "" }) {
  const [busy, setBusy] = useState(false);
  const press = async () => {
    if (busy) return;
    setBusy(true);
    try {
      const reply = await run();
      if (done) say(typeof done === "function" ? done(reply) : done);
      onDone?.();
    } catch (error) {
      say(error.message, true);
    }
    setBusy(false);
  };
  return html`<button type="button" class=${kind} aria-disabled=${busy} aria-label=${label}
    onClick=${press}>${children}</button>`;
}

// Dialogs

let showDialog = () => {};

/** Show a dialog: make(close) returns what is in it. */
export const openDialog = (make) => showDialog(() => make);

export function Dialogs() {
  const [make, set] = useState(null);
  showDialog = set;
  return make && make(() => set(null));
}

export function Dialog({ title, close, children, kind = "" }) {
  const box = useRef(null);
  useLayoutEffect(() => {
    const opener = document.activeElement;
    box.current.showModal();
    return () => {
      box.current?.close();
      if (opener?.isConnected) opener.focus();
    };
  }, []);
  return html`<dialog ref=${box} class=${kind} aria-labelledby="dialog-title" onClose=${close}>
    <h2 id="dialog-title">${title}</h2>
    ${children}
  </dialog>`;
}

// What a page shows instead of data

/**
 * What is to be said of data that useData gave, in words: they load, they failed, there are none,
 * or they are not up to date. Renders nothing when there is nothing to say.
 */
export function Instead({ of: { data, error }, empty, children }) {
  if (data === null && error) {
    const later = error.passes ? "; it is asked again every few seconds" : "";
    return html`<p class="instead failed" role="alert">Not shown: ${error.message}${later}.</p>`;
  }
  if (data === null) return html`<p class="instead">Loading …</p>`;
  if (error) return html`<p class="stale">Not up to date: ${error.message}</p>`;
  return empty ? html`<p class="instead">${children}</p>` : null;
}

const SINCE = [
  ["", "any time"],
  ["900", "15 minutes"],
  ["3600", "1 hour"],
  ["86400", "1 day"],
  ["604800", "7 days"],
];

export const Since = ({ label, value, change }) => html`<label>${label}
  <select name="since" value=${value} onChange=${change}>
    ${SINCE.map(([length, words]) => html`<option value=${length}>${words}</option>`)}
    ${SINCE.every(([length]) => length !== value) &&
    html`<option value=${value}>since ${value}</option>`}
  </select></label>`;

/** Name and value pairs. Pairs without a value are left out. */
export const Facts = ({ pairs, label }) => html`<dl class="facts" aria-label=${label}>
  ${pairs
    .filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
</dl>`;

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`Copied ${what}.`);
  } catch {
    // Browsers offer the clipboard to localhost and https alone.
    openDialog((close) => html`<${Dialog} title=${`Copy ${what}`} close=${close}>
      <textarea class="code" readonly rows="6" aria-label=${what} value=${text}
        ref=${(area) => area?.select()}></textarea>
      <footer><button type="button" onClick=${close}>Close</button></footer>
    </${Dialog}>`);
  }
}

export const sum = (rows, field) => rows.reduce((total, row) => total + row[field], 0);

/** The part of an id that tells it from others at a glance. */
export const shortId = (uuid) => uuid.replace(/^(task|chord|group(_flow)?)_/, "").slice(0, 8);
