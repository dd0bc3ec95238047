import { html, useState } from "../preact.js";
import { post, useData, useMayChange } from "../api.js";
import { plural } from "../format.js";
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
  figure("Running", "running", tasksIn("RECEIVED", "STARTED")),
  figure("Delayed", "delayed"),
  figure("Failed", "failed", tasksIn("FAILURE")),
  figure("Dead", "dead", (one) => link("dead", { queue: one.queue })),
  seconds("Oldest", (one) => one.oldest),
  figure("Per min", "per_minute"),
];

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
      columns=${mayChange ? [...COUNTS, actions(buttons)] : COUNTS} />`}`;
}
