import { html, useState } from "../preact.js";
import { post, useData, useMayChange } from "../api.js";
import { duration, number, plural } from "../format.js";
import { Action, Dialog, Instead, link, openDialog, say } from "../parts.js";
import { actions, figure, queueColumn, seconds, Table } from "../table.js";

/** Ask with the number of messages that go; ask again if there are many more by now. */
function Purge({ queue, close, onDone }) {
  const [count, setCount] = useState(queue.waiting + queue.delayed);
  const [grown, setGrown] = useState(false);
  const purge = async () => {
    try {
      const reply = await post("queues/purge", { queue: queue.queue, expected: count });
      say(`Deleted ${plural(reply.done, "message")} of ${queue.queue}.`);
      onDone();
      close();
    } catch (error) {
      if (error.status !== 409 || !error.body?.count) throw error;
      setCount(error.body.count);
      setGrown(true);
    }
  };
  return html`<${Dialog} title=${`Purge ${queue.queue}`} close=${close}>
    <p>${grown && "The queue has grown meanwhile. "}<strong>${plural(count, "message")}</strong>,
      waiting and delayed, will be deleted for good. Running tasks go on.</p>
    <footer>
      <button type="button" onClick=${close}>Cancel</button>
      <${Action} kind="danger" run=${purge}>Delete ${plural(count, "message")}</${Action}>
    </footer>
  </${Dialog}>`;
}

const tasksIn = (...state) => (one) => link("tasks", { queue: one.queue, state });

export const COUNTS = [
  queueColumn,
  figure("Waiting", "waiting", tasksIn("PENDING")),
  figure("Held", "running", tasksIn("RECEIVED", "STARTED")),
  figure("Delayed", "delayed"),
  figure("Failed", "failed", tasksIn("FAILURE")),
  figure("Dead", "dead", (one) => link("dead", { queue: one.queue })),
  seconds("Oldest", (one) => one.oldest),
  figure("Per min", "per_minute"),
];

const LIMITS = [
  { head: "Task", kind: "name", cell: (one) => one.name },
  {
    head: "Limit",
    kind: "short",
    cell: (one) => html`${one.limit} ${one.changed && html`<span class="badge">changed</span>`}`,
  },
  { head: "Key", kind: "short", cell: (one) => one.key || "–" },
  { head: "Running", kind: "number", cell: (one) => (one.running == null ? "–" : number(one.running)) },
  { head: "Waiting", kind: "number", cell: (one) => (one.in_use ? number(one.waiting) : "–") },
  {
    head: "Next turn",
    kind: "number",
    cell: (one) => (one.in_use ? (one.wait ? `in ${duration(one.wait)}` : "now") : "–"),
  },
];

/** Change a limit; without a name, that of a task whose name is typed. */
function ChangeLimit({ limit, close, onDone }) {
  const [name, setName] = useState(limit.name);
  const [value, setValue] = useState(limit.limit.split("=")[1]);
  const change = () => post("limits/change", { name, option: limit.option, value });
  return html`<${Dialog} title=${`Change ${limit.option} of ${limit.name || "a task"}`} close=${close}>
    <p>It counts for all workers from their next runs on, until it is reset.</p>
    ${!limit.name &&
    html`<label>Task <input value=${name}
      onInput=${(event) => setName(event.target.value)} /></label>`}
    <label>${limit.option} <input value=${value}
      onInput=${(event) => setValue(event.target.value)} /></label>
    <footer>
      <button type="button" onClick=${close}>Cancel</button>
      <${Action} run=${change} onDone=${() => (onDone(), close())}
        done=${`${name}: ${limit.option}=${value}, from now on.`}>Change</${Action}>
    </footer>
  </${Dialog}>`;
}

/** The limits of tasks: changed, for all workers at once. */
function Limits() {
  const found = useData("limits", {}, 2);
  const mayChange = useMayChange();
  const rows = found.data?.limits || [];
  const buttons = (one) => {
    if (one.in_use) return null;
    const dialog = (close) =>
      html`<${ChangeLimit} limit=${one} close=${close} onDone=${found.refresh} />`;
    return html`<button type="button" aria-label=${`Change ${one.option} of ${one.name}`}
        onClick=${() => openDialog(dialog)}>Change …</button>
      ${one.changed &&
      html`<${Action} run=${() => post("limits/reset", { name: one.name })}
        onDone=${found.refresh} label=${`Reset ${one.name}`}
        done=${`The limits of the code count again for ${one.name}.`}>Reset</${Action}>`}`;
  };
  if (!rows.length && !mayChange) return null;
  const limitRate = (close) => html`<${ChangeLimit} close=${close} onDone=${found.refresh}
    limit=${{ name: "", option: "rate", limit: "rate=5/s" }} />`;
  return html`<section><h2>Limits</h2>
    ${mayChange &&
    html`<p><button type="button" onClick=${() => openDialog(limitRate)}>Limit the rate of a task …</button></p>`}
    <${Table} label="Limits" rows=${rows}
      rowKey=${(one) => `${one.name} ${one.option} ${one.in_use} ${one.key}`}
      columns=${mayChange ? [...LIMITS, actions(buttons)] : LIMITS} />
  </section>`;
}

export function Queues() {
  const found = useData("queues", {}, 2);
  const mayChange = useMayChange();
  const rows = found.data?.queues || [];
  const buttons = (one) => {
    const [verb, path] = one.paused ? ["Resume", "queues/resume"] : ["Pause", "queues/pause"];
    const purge = (close) =>
      html`<${Purge} queue=${one} close=${close} onDone=${found.refresh} />`;
    return html`<${Action} run=${() => post(path, { queue: one.queue })} onDone=${found.refresh}
        label=${`${verb} ${one.queue}`} done=${`${verb}d ${one.queue}.`}>${verb}</${Action}>
      <button type="button" class="quiet-danger" aria-label=${`Purge ${one.queue}`}
        onClick=${() => openDialog(purge)}>Purge …</button>`;
  };
  return html`<h1 tabindex="-1">Queues</h1>
    <${Instead} of=${found} empty=${!rows.length}>
      No queue yet: one appears with its first task or worker.</${Instead}>
    ${rows.length > 0 &&
    html`<${Table} label="Queues" rows=${rows} rowKey=${(one) => one.queue}
      columns=${mayChange ? [...COUNTS, actions(buttons)] : COUNTS} />`}
    <${Limits} />`;
}
