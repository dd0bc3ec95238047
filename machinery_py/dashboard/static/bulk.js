/** Changes of many tasks or dead letters: count them, ask, go on step by step, say how it ended. */

import { html, useEffect, useRef, useState } from "./preact.js";
import { post } from "./api.js";
import { duration, number, plural } from "./format.js";
import { Dialog, openDialog, stateWord } from "./parts.js";

const PAUSE = 2000; // milliseconds until a step is tried again that the store could not take

const TASKS = { thing: "task", field: "uuids", batch: 1000 }; // batch: what the API takes at once
const LETTERS = { thing: "letter", field: "ids", batch: 100 };

/** path of the API: its words; `only`: which of the chosen ones it changes at all; `skip`: what
 * those are that it has not changed. */
const ACTIONS = {
  "tasks/retry": { ...TASKS, verb: "Retry", ended: "sent again", only: "failed" },
  "tasks/revoke": {
    ...TASKS,
    verb: "Revoke",
    ended: "revoked",
    only: "unfinished",
    skip: "had ended before",
    note: "A task that runs is asked to stop.",
    danger: true,
  },
  "tasks/delete": {
    ...TASKS,
    verb: "Delete",
    ended: "deleted",
    only: "finished",
    note: "Their states and results are gone for good.",
    danger: true,
  },
  "dead/replay": {
    ...LETTERS,
    verb: "Send again",
    ended: "sent again",
    only: "readable",
    note: "They go back into their queues, without strikes.",
  },
  "dead/delete": {
    ...LETTERS,
    verb: "Delete",
    ended: "deleted",
    only: "remaining",
    note: "Their messages are gone for good.",
    danger: true,
  },
};

/** Ask until there is an answer; null if it was stopped. A store that is away is waited for. */
async function patiently(ask, tell, isStopped) {
  while (!isStopped()) {
    try {
      return await ask();
    } catch (error) {
      if (!error.passes) throw error;
      tell({ trouble: `${error.message}; trying again` });
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
    }
  }
  return null;
}

/** Make all calls of one bulk action, and hand each answer to `tell`. */
async function walk(path, bodies, tell, isStopped) {
  for (const body of bodies) {
    let cursor = "";
    do {
      const step = cursor ? { ...body, cursor } : body;
      const reply = await patiently(() => post(path, step), tell, isStopped);
      if (!reply) return;
      tell({ ...reply, trouble: "" });
      cursor = reply.cursor;
    } while (cursor);
  }
}

/** Return a filter in words. */
function describe(filter) {
  const words = Object.entries(filter)
    .filter(([, value]) => value?.length)
    .map(([key, value]) =>
      key === "state" ? value.map(stateWord).join(" or ") : `${key} ${value}`,
    );
  return words.length ? `that match: ${words.join(", ")}` : "in all";
}

function Bulk({ action, ids, filter, onDone, close }) {
  const { thing, field, batch, verb, ended, only, skip, note, danger } = ACTIONS[action];
  const first = ids ? { phase: "ready", count: ids.length } : { phase: "counting", count: 0 };
  const [at, set] = useState({ ...first, done: 0, skipped: 0 });
  const [terminate, setTerminate] = useState(false);
  const stopped = useRef(false);
  const { phase, count, done, skipped, took, trouble } = at;

  const go = async (path, bodies, next) => {
    const start = performance.now();
    const add = (old, reply, key) => old[key] + (reply[key] || 0);
    const tell = (reply) =>
      set((old) => ({
        ...old,
        trouble: reply.trouble,
        count: add(old, reply, "count"),
        done: add(old, reply, "done"),
        skipped: add(old, reply, "skipped"),
      }));
    const change = await walk(path, bodies, tell, () => stopped.current).then(
      () => ({ phase: next, trouble: "" }),
      (error) => ({ phase: "ended", trouble: error.message }),
    );
    set((old) => ({ ...old, ...change, took: (performance.now() - start) / 1000 }));
  };
  const start = async () => {
    set({ ...at, phase: "running" });
    const extra = terminate ? { terminate } : {};
    const bodies = filter ? [{ filter, ...extra }] : [];
    for (let from = 0; ids && from < ids.length; from += batch) {
      bodies.push({ [field]: ids.slice(from, from + batch), ...extra });
    }
    await go(action, bodies, "ended");
    onDone?.();
  };
  useEffect(() => {
    if (!ids) go("tasks/count", [{ filter, action: action.split("/")[1] }], "ready");
    return () => {
      stopped.current = true;
    };
  }, []);

  const which = ids ? "selected" : describe(filter);
  const button = (label, press, kind = "") =>
    html`<button type="button" class=${kind} onClick=${press}>${label}</button>`;
  return html`<${Dialog} title=${`${verb} ${thing}s`} close=${close}>
    ${phase === "counting" &&
    html`<p role="status">Counting the ${only} ${thing}s ${which} … ${number(count)} so far.</p>
      <progress aria-label="Counting"></progress>`}
    ${phase === "ready" &&
    html`<p><strong>${plural(count, thing)}</strong> ${which}.</p>
      <p class="muted">Only ${only} ${thing}s are ${ended}. ${note}</p>`}
    ${phase === "ready" &&
    action === "tasks/revoke" &&
    html`<label class="check">
      <input type="checkbox" checked=${terminate}
        onChange=${(event) => setTerminate(event.target.checked)} />
      End tasks that run, with their task processes
    </label>`}
    ${phase === "running" &&
    html`<p role="status">${number(done)} of ${number(count)} ${ended} …</p>
      <progress aria-label="Progress" max=${count || 1} value=${done + skipped}></progress>`}
    ${phase === "ended" &&
    html`<p role="status" class="result">
      <strong>${plural(done, thing)} ${ended}</strong> in ${duration(took)}.
      ${skipped > 0 && ` ${number(skipped)} ${skip || `skipped: not ${only}, or gone`}.`}
    </p>`}
    ${trouble && html`<p class="failed" role="alert">${trouble}</p>`}
    <footer>
      ${phase === "running" && button("Stop", () => (stopped.current = true))}
      ${phase === "ended" && button("Close", close, "primary")}
      ${(phase === "counting" || phase === "ready") && button("Cancel", close)}
      ${phase === "ready" &&
      count > 0 &&
      button(`${verb} ${plural(count, thing)}`, start, danger ? "danger" : "primary")}
    </footer>
  </${Dialog}>`;
}

/** Open the dialog of an action on `ids`, or else on all tasks that `filter` finds. */
export const openBulk = (action, what) =>
  openDialog((close) => html`<${Bulk} action=${action} ...${what} close=${close} />`);

/** The buttons of some actions, beside the words for what they act on. */
export const BulkBar = ({ actions, scope, what }) => html`<div class="scope" role="group"
  aria-label=${`Actions on: ${scope}`}>
  <span role="status">${scope}:</span>
  ${actions.map(
    (action) => html`<button type="button" key=${action} onClick=${() => openBulk(action, what)}>
      ${ACTIONS[action].verb} …
    </button>`,
  )}
</div>`;
