import { html, useState } from "../preact.js";
import { post, useData, useMayChange } from "../api.js";
import { bytes, duration, number } from "../format.js";
import { Action, Dialog, Facts, Instead, link, openDialog } from "../parts.js";
import { figure, named, seconds, Table, taskColumn, text, time } from "../table.js";

const WORKERS = [
  named(
    "Worker",
    "name",
    (one) => link("worker", { name: one.name }),
    (one) =>
      one.stalled &&
      html`<span class="badge bad" title="A task holds its interpreter.">stalled</span>`,
  ),
  { head: "Queues", kind: "wide", cell: (one) => one.queues.join(", ") },
  figure("Holds", "holding"),
  { head: "Process", kind: "short", cell: (one) => `${one.pid} on ${one.host}` },
  time("Started", "started_at"),
  time("Last beat", "beat_at"),
];

export function Workers() {
  const found = useData("workers", {}, 2);
  const rows = found.data?.workers || [];
  return html`<h1 tabindex="-1">Workers</h1>
    <${Instead} of=${found} empty=${!rows.length}>
      No worker is alive. Start one: <code>machinery worker your_module</code></${Instead}>
    ${rows.length > 0 &&
    html`<${Table} label="Workers" columns=${WORKERS} rows=${rows}
      rowKey=${(one) => one.session} />`}`;
}

function ShutDown({ name, close }) {
  const leave = () => {
    close();
    location.hash = "#/workers";
  };
  return html`<${Dialog} title=${`Shut down ${name}`} close=${close}>
    <p>It takes no more tasks, finishes those that run, and ends. Nothing here starts it again.</p>
    <footer>
      <button type="button" onClick=${close}>Cancel</button>
      <${Action} kind="danger" run=${() => post("workers/shutdown", { name })} onDone=${leave}
        done=${`${name} shuts down.`}>Shut down</${Action}>
    </footer>
  </${Dialog}>`;
}

function Control({ name, stats, refresh }) {
  const [wanted, setWanted] = useState("");
  const value = wanted || stats.concurrency;
  const ask = (close) => html`<${ShutDown} name=${name} close=${close} />`;
  const change = () => post("workers/concurrency", { name, concurrency: Number(value) });
  return html`<div class="buttons">
    <label>Concurrency <input type="number" min="1" value=${value}
      onInput=${(event) => setWanted(event.target.value)} /></label>
    <${Action} run=${change} onDone=${() => (setWanted(""), refresh())}
      done=${`${name} runs up to ${value} at once.`}>Set</${Action}>
    <button type="button" class="quiet-danger" onClick=${() => openDialog(ask)}>
      Shut down …</button>
  </div>`;
}

const ACTIVE = [
  taskColumn,
  seconds("For", (one) => one.seconds),
  figure("Try", "attempt"),
  text("Queue", "queue"),
  text("Place", "place"),
  {
    head: "Arguments",
    kind: "call",
    cell: (one) => html`<code>${one.args?.map(({ value }) => JSON.stringify(value)).join(", ")}</code>`,
  },
  { head: "Note", kind: "wide", cell: (one) => one.cancelled && "asked to stop" },
];

export function Worker({ query }) {
  const name = query.get("name") || "";
  const found = useData("worker", { name }, 2);
  const mayChange = useMayChange();
  const { stats, active = [], queues = [], trouble = "" } = found.data || {};
  return html`<h1 tabindex="-1">${name}</h1>
    <${Instead} of=${found} />
    ${trouble && html`<p class="instead">${trouble}</p>`}
    ${stats &&
    html`${mayChange &&
      html`<${Control} name=${name} stats=${stats} refresh=${found.refresh} />`}
      <${Facts} label="Facts" pairs=${[
        ["Runs", `${number(stats.active)} of ${number(stats.concurrency)} (${stats.pool})`],
        ["Holds", number(stats.held)],
        ["Ended", `${number(stats.processed)}, ${number(stats.failed)} failed`],
        ["Up", duration(stats.uptime)],
        ["Memory", bytes(stats.memory)],
        ["Load of the host", stats.load?.map((one) => one.toFixed(2)).join(", ")],
        ["Threads", number(stats.threads)],
        ["Store", stats.connected ? "connected" : "not reached"],
        ["Process", `${stats.pid} on ${stats.host}`],
        ["Version", `${stats.version}, Python ${stats.python}`],
        ["Queues", queues.map((one) => one.name).join(", ")],
      ]} />
      <section><h2>Running tasks</h2>
        <${Instead} of=${{ data: active }} empty=${!active.length}>It runs nothing now.</${Instead}>
        ${active.length > 0 &&
        html`<${Table} label="Running tasks" rows=${active} rowKey=${(one) => one.uuid}
          columns=${ACTIVE} />`}
      </section>`}`;
}
