import { html } from "../preact.js";
import { Graph } from "../graph.js";
import { post, useData, useMayChange } from "../api.js";
import { between, duration, number, plural } from "../format.js";
import {
  Action, copy, Dialog, Facts, Instead, isFinished, link, openDialog, Progress, shortId, State,
  STATES, stateWord, Time,
} from "../parts.js";
import { named, Table, taskColumn, time } from "../table.js";

const progress = (one) => html`<${Progress} of=${[one.done, one.total]} />
  ${one.failed > 0 && html` <span class="failed">${number(one.failed)} failed</span>`}`;

const FLOWS = [
  named(
    "Workflow",
    "name",
    (one) => link("workflow", { uuid: one.uuid }),
    (one) => html`<span class="id">${shortId(one.uuid)}</span>
      ${one.cancelled && html` <span class="badge">cancelled</span>`}`,
  ),
  { head: "State", kind: "short", cell: (one) => html`<${State} of=${one.state} />` },
  { head: "Tasks", kind: "short", cell: progress },
  time("Sent", "created_at"),
];

export function Workflows() {
  const found = useData("workflows", {}, 3);
  const rows = found.data?.workflows || [];
  return html`<h1 tabindex="-1">Workflows</h1>
    <${Instead} of=${found} empty=${!rows.length}>
      No workflow of late. Send a chain, a group or a chord.</${Instead}>
    ${rows.length > 0 &&
    html`<${Table} label="Workflows" columns=${FLOWS} rows=${rows} rowKey=${(one) => one.uuid} />`}`;
}

function Cancel({ flow, close, onDone }) {
  const end = () => {
    close();
    onDone();
  };
  return html`<${Dialog} title=${`Cancel ${flow.name}`} close=${close}>
    <p>Nothing of it starts any more. Running tasks are asked to stop. It cannot be retried then.</p>
    <footer>
      <button type="button" onClick=${close}>Leave it</button>
      <${Action} kind="danger" run=${() => post("workflows/cancel", { uuid: flow.uuid })}
        onDone=${end} done=${(reply) => `Cancelled: ${plural(reply.done, "task")}.`}>
        Cancel it</${Action}>
    </footer>
  </${Dialog}>`;
}

function Buttons({ flow, refresh }) {
  const mayChange = useMayChange();
  const ask = (close) => html`<${Cancel} flow=${flow} close=${close} onDone=${refresh} />`;
  return html`<div class="buttons">
    ${mayChange &&
    flow.failed > 0 &&
    !flow.cancelled &&
    html`<${Action} kind="primary" run=${() => post("workflows/retry", { uuid: flow.uuid })}
      onDone=${refresh} done=${(reply) => `${plural(reply.done, "task")} sent again.`}>
      Retry what failed</${Action}>`}
    ${mayChange &&
    !isFinished(flow.state) &&
    !flow.cancelled &&
    html`<button type="button" class="quiet-danger" onClick=${() => openDialog(ask)}>
      Cancel …</button>`}
    <button type="button" onClick=${() => copy(flow.uuid, "the id")}>Copy id</button>
  </div>`;
}

const MEMBERS = [
  taskColumn,
  { head: "State", kind: "short", cell: (one) => html`<${State} of=${one.state} />` },
  { head: "Error", kind: "wide", cell: (one) => one.error },
  time("Finished", "finished_at"),
];

function Step({ step }) {
  const { counts, total, started_at, finished_at } = step;
  const sent = STATES.reduce((all, one) => all + (counts[one] || 0), 0);
  const isOver = (counts.SUCCESS || 0) + (counts.FAILURE || 0) === total;
  const took = isOver ? between(started_at, finished_at) : null;
  return html`<section>
    <h2>${step.name}${step.is_group && ` ×${number(total)}`}</h2>
    <p class="tally">
      ${STATES.filter((one) => counts[one]).map(
        (one) => html`<span key=${one}>${number(counts[one])} <${State} of=${one} /></span> `,
      )}
      ${sent < total && html`<span class="muted">${number(total - sent)} not sent</span>`}
    </p>
    ${step.error &&
    html`<p class="failed"><strong>${step.error_type}</strong> ${step.error}</p>`}
    <${Facts} label=${step.name} pairs=${[
      ["Started", started_at && html`<${Time} at=${started_at} />`],
      ["Took", took === null ? "" : duration(took)],
      ["Try", step.attempt > 1 ? step.attempt : ""],
    ]} />
    ${step.tasks.length > 0 &&
    html`<${Table} label=${`Tasks of ${step.name}`} columns=${MEMBERS} rows=${step.tasks}
      rowKey=${(one) => one.uuid} />`}
    ${sent > step.tasks.length && html`<p class="muted">The first ${step.tasks.length} of
      ${number(sent)}.</p>`}
  </section>`;
}

const COLUMNS = 40; // steps that are drawn
const BOXES = 6; // of the members of a group

/** Return a step's boxes: of a group the first members, those that failed first. */
function boxesOf(step) {
  const boxes = step.tasks.slice(0, BOXES).map((one) => ({
    key: one.uuid,
    title: one.name || step.name,
    note: one.error || stateWord(one.state),
    state: one.state,
    href: link("task", { uuid: one.uuid }),
  }));
  const others = step.total - boxes.length;
  if (others <= 0) return boxes;
  const note = boxes.length ? "" : "not sent";
  const title = step.total > 1 ? `${number(others)} ${boxes.length ? "more" : step.name}` : step.name;
  return [...boxes, { key: step.uuid, title, note, state: "" }];
}

/** Return the first steps as columns, and how many more there are. */
function columnsOf(steps) {
  const columns = steps.slice(0, COLUMNS).map(boxesOf).filter((one) => one.length);
  const more = steps.length - COLUMNS;
  if (more <= 0) return columns;
  return [...columns, [{ key: "more", title: `${number(more)} more`, note: "", state: "" }]];
}

export function Workflow({ query }) {
  const uuid = query.get("uuid") || "";
  const found = useData("workflow", { uuid }, 2);
  const flow = found.data;
  return html`${!flow && html`<h1 tabindex="-1">Workflow</h1>`}
    <${Instead} of=${found} />
    ${flow &&
    html`<div class="title">
        <h1 tabindex="-1">${flow.name}</h1><${State} of=${flow.state} />
        ${flow.cancelled && html`<span class="badge">cancelled</span>`}
        <code class="uuid">${flow.uuid}</code>
      </div>
      <${Buttons} flow=${flow} refresh=${found.refresh} />
      <${Facts} label="Facts" pairs=${[
        ["Tasks", progress(flow)],
        ["Sent", html`<${Time} at=${flow.created_at} />`],
      ]} />
      <${Graph} label="Steps" columns=${columnsOf(flow.steps)} />
      ${flow.steps.map((one) => html`<${Step} key=${one.uuid} step=${one} />`)}`}`;
}
