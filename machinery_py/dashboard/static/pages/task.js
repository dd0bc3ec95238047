import { html, useState } from "../preact.js";
import { post, useData, useMayChange } from "../api.js";
import { openBulk } from "../bulk.js";
import { between, clock, duration, exact, moment, now, number } from "../format.js";
import { Graph } from "../graph.js";
import {
  Action, copy, Facts, Instead, isFinished, link, Progress, shortId, State, STATES, stateWord, Time,
} from "../parts.js";
import { Table, text } from "../table.js";

const DEPTH = 4; // generations of follow-up tasks that are shown
const BOXES = 40; // of the last steps of a task
const MEMBERS = 20; // of a group, until all are asked for
const WHEN = { success: "then", error: "on failure", chord: "after the group" };
const NOT_SENT = "Not sent: it has not failed, or its message is gone.";

function Buttons({ task, refresh, mayChange }) {
  const change = (verb) => {
    const act = () =>
      openBulk(`tasks/${verb.toLowerCase()}`, { ids: [task.uuid], onDone: refresh });
    return html`<button type="button" class="quiet-danger" onClick=${act}>${verb} …</button>`;
  };
  const retry = () => post("tasks/retry", { uuids: [task.uuid] });
  return html`<div class="buttons">
    ${mayChange &&
    task.state === "FAILURE" &&
    html`<${Action} kind="primary" run=${retry} onDone=${refresh}
      done=${(reply) => (reply.done ? "Sent again." : NOT_SENT)}>Retry</${Action}>`}
    ${mayChange && change(isFinished(task.state) ? "Delete" : "Revoke")}
    ${task.python &&
    html`<button type="button" onClick=${() => copy(task.python, "the call")}>
      Copy as Python</button>`}
    <button type="button" onClick=${() => copy(task.uuid, "the id")}>Copy id</button>
    <a class="button" href=${link("tasks", { name: task.name })}>Others of this name</a>
  </div>`;
}

/** Return the tries, the last one as well, and when each ended; one that runs ends now. */
function triesOf(task) {
  const tries = task.attempts.map((one) => ({ ...one, state: "RETRY" }));
  if (task.started_at && tries.at(-1)?.number !== task.attempt) {
    tries.push({ ...task, number: task.attempt, ended_at: task.finished_at });
  }
  return tries.map((one) => ({
    ...one,
    begin: moment(one.started_at) || moment(one.ended_at) || now(),
    end: moment(one.ended_at) || now(),
    words: one.error_type ? `${one.error_type}: ${one.error}` : one.error,
  }));
}

/** All tries from the moment of sending to the end, as bars over one axis of time. */
function Timeline({ task }) {
  const tries = triesOf(task);
  const first = moment(task.created_at) || tries[0]?.begin || now();
  const length = Math.max(1, ...tries.map((one) => one.end - first));
  const percent = (span) => `${(100 * Math.max(0, span)) / length}%`;
  const place = (from, to) => ({
    left: `min(${percent(from - first)}, 100% - 3px)`, // so that the shortest bar is seen
    width: percent(to - from),
  });
  const bar = (kind, from, to) =>
    html`<span class="track"><i class=${kind} style=${place(from, to)}></i></span>`;
  const begun = tries.length ? tries[0].begin : first;
  const waits = !isFinished(task.state) && task.state !== "STARTED";
  return html`<section>
    <h2>Timeline</h2>
    <ol class="timeline">
      <li><span>Sent</span>${bar("waited", first, begun)}
        <span class="when"><${Time} at=${task.created_at} />
          ${begun > first && `, waited ${duration((begun - first) / 1000)}`}</span>
      </li>
      ${tries.map(
        (one) => html`<li key=${one.number}>
          <span>Try ${one.number}</span>${bar(`is-${one.state.toLowerCase()}`, one.begin, one.end)}
          <span class="when" title=${one.started_at && exact(one.started_at)}>
            ${duration((one.end - one.begin) / 1000)}${!one.ended_at && " so far"}
            ${one.worker && ` on ${one.worker}`}</span>
          ${one.words && html`<span class="why failed">${one.words}</span>`}
        </li>`,
      )}
      ${waits &&
      html`<li><span>${stateWord(task.state)}</span><span class="track"></span>
        <span class="when">
          ${task.eta ? html`due <${Time} at=${task.eta} />` : "waits for a worker"}</span>
      </li>`}
    </ol>
  </section>`;
}

const VALUES = [
  text("Name", "name"),
  text("Type", "type"),
  { head: "Value", kind: "wide code-cell", cell: (one) => html`<code>${one.value}</code>` },
];

const Values = ({ title, values }) => html`<section>
  <h2>${title}</h2>
  ${values.length === 0 && html`<p class="muted">None.</p>`}
  ${values.length > 0 &&
  html`<${Table} label=${title} columns=${VALUES} rowKey=${(one) => one.key}
    rows=${values.map((one, i) => ({ ...one, key: String(i), name: one.name || i }))} />`}
</section>`;

const Id = ({ of }) => html`<span class="id">${shortId(of)}</span>`;

const Leaf = ({ task, here }) => html`<span class="leaf">
  <${State} of=${task.state} />
  ${here
    ? html`<strong aria-current="true">${task.name}</strong>`
    : html`<a href=${link("task", { uuid: task.uuid })}>${task.name || "unknown"}</a>`}
  <${Id} of=${task.uuid} />
</span>`;

/** A task that follows, with those that follow it. */
function Follower({ child, depth }) {
  const { data, error } = useData("task", { uuid: child.uuid });
  return html`<li>
    <span class="muted">${WHEN[child.when] || child.when} </span>
    ${data ? html`<${Leaf} task=${data} />` : html`${child.name} <${Id} of=${child.uuid} />`}
    ${error && html`<span class="muted"> not sent yet</span>`}
    ${data && depth < DEPTH && html`<${Followers} of=${data.children} depth=${depth + 1} />`}
    ${depth >= DEPTH && data?.children.length > 0 && " …"}
  </li>`;
}

const Followers = ({ of, depth }) =>
  of.length > 0 &&
  html`<ul>
    ${of.map(
      (one, i) => html`<${Follower} key=${`${i} ${one.uuid}`} child=${one} depth=${depth} />`,
    )}
  </ul>`;

function Members({ group, self, uuid }) {
  const [all, setAll] = useState(false);
  const others = group.members.filter((one) => one.uuid !== uuid);
  const count = (state) => group.members.filter((one) => one.state === state).length;
  return html`<li>
    Group of ${number(group.members.length)} <${Id} of=${group.uuid} />
    <span class="tally">
      ${STATES.filter(count).map(
        (one) => html`<span key=${one}>${number(count(one))} <${State} of=${one} /></span>`,
      )}
    </span>
    <ul>
      ${self}
      ${others
        .slice(0, all ? others.length : MEMBERS)
        .map((one) => html`<li key=${one.uuid}><${Leaf} task=${one} /></li>`)}
      ${!all &&
      others.length > MEMBERS &&
      html`<li><button type="button" onClick=${() => setAll(true)}>
        Show all ${number(group.members.length)}</button></li>`}
    </ul>
  </li>`;
}

function Workflow({ task }) {
  if (!task.group && !task.children.length) return null;
  const self = html`<li key=${task.uuid}>
    <${Leaf} task=${task} here /><${Followers} of=${task.children} depth=${1} />
  </li>`;
  return html`<section>
    <h2>Workflow</h2>
    <ul class="tree">
      ${task.group
        ? html`<${Members} group=${task.group} self=${self} uuid=${task.uuid} />`
        : self}
    </ul>
  </section>`;
}

/** Return what a step has returned, or raised. */
const endOf = (step) =>
  step.error_type
    ? html`<span class="failed">${step.error_type}: ${step.error}</span>`
    : html`<code>${step.results.map((one) => one.value).join(", ")}</code>`;

/** Return the last steps of a task as boxes, and what it does now. */
function boxesOf(task) {
  const steps = task.steps.slice(-BOXES).map((one) => ({
    key: `step ${one.name}`,
    title: one.name,
    note: one.error_type ? one.error : clock(moment(one.at) / 1000),
    state: one.error_type ? "FAILURE" : "SUCCESS",
  }));
  const isAsleep = task.error_type === "Suspended";
  const before = task.steps.length - steps.length;
  const now = { key: "now", title: isAsleep ? "Suspended" : stateWord(task.state), state: task.state };
  return [
    ...(before ? [{ key: "before", title: `${number(before)} before`, note: "", state: "" }] : []),
    ...steps,
    { ...now, note: isAsleep || task.state === "FAILURE" ? task.error : "" },
  ].map((one) => [one]);
}

const Steps = ({ task, steps = task.steps }) =>
  steps.length > 0 &&
  html`<section class="pairs"><h2>Steps</h2>
    <${Graph} label="Steps as boxes" columns=${boxesOf(task)} />
    <${Facts} label="Steps"
      pairs=${steps.map((one) => [one.name, html`${endOf(one)} <${Time} at=${one.at} />`])} />
  </section>`;

/** What holds a task that has not ended, in the words of `machinery why`. */
function Why({ uuid }) {
  const { data } = useData("why", { uuid }, 5);
  if (!data?.reasons.length) return null;
  return html`<section>
    <h2>Why</h2>
    <ul>
      ${data.reasons.map(
        (one) => html`<li key=${one.text}>${one.text}
          ${one.hint && html`<br /><code>${one.hint}</code>`}</li>`,
      )}
    </ul>
  </section>`;
}

/** Return what was typed as a value: JSON, or else a text; nothing is null. */
function valueOf(typed) {
  if (!typed.trim()) return null;
  try {
    return JSON.parse(typed);
  } catch {
    return typed;
  }
}

/** Lets somebody give the task the signal that it waits for: once, however often it is pressed. */
function Signal({ task, refresh }) {
  const [typed, setTyped] = useState("");
  const key = `dashboard ${task.steps.length}`; // another one after the next checkpoint
  const send = () =>
    post("tasks/signal", { uuid: task.uuid, name: task.waits_for, value: valueOf(typed), key });
  return html`<section>
    <h2>Waits for ${task.waits_for}</h2>
    <div class="buttons">
      <label>Value <input value=${typed} placeholder="JSON, or a text" spellcheck=${false}
        onInput=${(event) => setTyped(event.target.value)} /></label>
      <${Action} kind="primary" run=${send} onDone=${refresh} done="Signal sent.">
        Send signal</${Action}>
    </div>
  </section>`;
}

const Pairs = ({ title, of }) =>
  Object.keys(of).length > 0 &&
  html`<section class="pairs"><h2>${title}</h2>
    <${Facts} label=${title} pairs=${Object.entries(of)} /></section>`;

const time = (at) => at && html`<${Time} at=${at} />`;

const isTask = (uuid) => uuid && !uuid.startsWith("group_");

function facts(task) {
  const { message, queue, worker, attempt } = task;
  const took = between(task.started_at, task.finished_at);
  const left = message?.retry_count === null ? "until it works" : message?.retry_count;
  return [
    ["Queue", queue && html`<a href=${link("tasks", { queue })}>${queue}</a>`],
    ["Worker", worker && html`<a href=${link("worker", { name: worker })}>${worker}</a>`],
    ["Sent by", isTask(task.parent) && html`<a href=${link("task", { uuid: task.parent })}>
      ${shortId(task.parent)}</a>`],
    ["Workflow", task.root.startsWith("group_flow_") &&
      html`<a href=${link("workflow", { uuid: task.root })}>${shortId(task.root)}</a>`],
    ["Sent", time(task.created_at)],
    ["Started", time(task.started_at)],
    ["Finished", time(task.finished_at)],
    ["Took", took === null ? "" : duration(took)],
    ["Due", isFinished(task.state) ? "" : time(task.eta)],
    ["Try", attempt],
    ["Retries left", left],
    ["Priority", message?.priority || ""],
    ["Progress", task.progress && html`<${Progress} of=${task.progress} />`],
  ];
}

/** Return what the text of a task that has not succeeded is. */
function headingOf(task) {
  if (task.state === "FAILURE") return "Error";
  return task.error_type === "Suspended" ? "Suspended" : "Error of the try before";
}

function Shown({ task, refresh }) {
  const mayChange = useMayChange();
  const { message } = task;
  const { machinery_attempts: _, ...headers } = message?.headers || {}; // the timeline shows those
  return html`<div class="title">
      <h1 tabindex="-1">${task.name || "Unknown task"}</h1><${State} of=${task.state} />
      <code class="uuid">${task.uuid}</code>
    </div>
    <${Buttons} task=${task} refresh=${refresh} mayChange=${mayChange} />
    <${Facts} label="Facts" pairs=${facts(task)} />
    ${task.error &&
    html`<section>
      <h2>${headingOf(task)}</h2>
      <p class="failed"><strong>${task.error_type}</strong> ${task.error}</p>
      ${task.traceback &&
      html`<pre class="code" tabindex="0" aria-label="Traceback">${task.traceback}</pre>`}
    </section>`}
    ${!isFinished(task.state) && html`<${Why} uuid=${task.uuid} />`}
    ${mayChange && task.waits_for &&
    html`<${Signal} key=${task.waits_for} task=${task} refresh=${refresh} />`}
    <${Timeline} task=${task} />
    <${Steps} task=${task} />
    ${task.arguments
      ? html`<${Values} title="Arguments" values=${task.arguments} />`
      : html`<section><h2>Arguments</h2><p class="muted">Not kept. They are known while a task waits
          or runs, when it failed or was tried again, and with the setting
          <code>keep_calls</code>.</p></section>`}
    ${task.state === "SUCCESS" &&
    html`<${Values} title="Result" values=${task.results} />`}
    <${Workflow} task=${task} />
    <${Pairs} title="Notes" of=${task.notes} />
    <${Pairs} title="Headers" of=${headers} />`;
}

export function Task({ query }) {
  const uuid = query.get("uuid") || "";
  const found = useData("task", { uuid }, 2);
  if (found.error?.status === 404) {
    return html`<h1 tabindex="-1">No such task</h1>
      <p class="instead">Nothing is known of <code>${uuid}</code>. A finished task is forgotten when
      its result expires. <a href="#/tasks">All tasks</a></p>`;
  }
  return html`${!found.data && html`<h1 tabindex="-1">Task</h1>`}
    <${Instead} of=${found} />
    ${found.data && html`<${Shown} task=${found.data} refresh=${found.refresh} />`}`;
}
