import { html, useState } from "../preact.js";
import { useData, useMayChange } from "../api.js";
import { BulkBar } from "../bulk.js";
import { number } from "../format.js";
import { Dialog, Facts, Instead, link, openDialog, shortId, Time } from "../parts.js";
import { figure, Table, text, time } from "../table.js";

const MOST = 1000; // letters that are listed

const Letter = ({ letter, close }) => html`<${Dialog} title=${letter.name || "Dead letter"}
  close=${close} kind="wide">
  <${Facts} label="Facts" pairs=${[
    ["Why", letter.reason],
    ["Error", letter.error],
    ["Queue", letter.queue],
    ["Task", letter.uuid && html`<a href=${link("task", { uuid: letter.uuid })} onClick=${close}>
      ${letter.uuid}</a>`],
    ["Strikes", letter.strikes || ""],
    ["Since", html`<${Time} at=${letter.died_at} />`],
  ]} />
  <h3>Message</h3>
  <pre class="code" tabindex="0" aria-label="Message">${letter.body}</pre>
  <footer><button type="button" onClick=${close}>Close</button></footer>
</${Dialog}>`;

const show = (letter) =>
  openDialog((close) => html`<${Letter} letter=${letter} close=${close} />`);

const COLUMNS = [
  {
    head: "Task",
    kind: "name",
    cell: (one) => html`<button type="button" class="linked" data-open onClick=${() => show(one)}>
        ${one.name || "no signature"}</button>
      <span class="id">${shortId(one.uuid || one.id)}</span>`,
  },
  text("Why", "reason"),
  text("Error", "error", "wide"),
  text("Queue", "queue"),
  figure("Strikes", "strikes"),
  time("Since", "died_at"),
];

export function Dead({ query }) {
  const queue = query.get("queue") || "";
  const found = useData("dead", { queue, limit: MOST });
  const mayChange = useMayChange();
  const [chosen, setChosen] = useState(new Set());
  const ids = found.data?.letters.map((one) => one.id) || [];
  const some = ids.filter((id) => chosen.has(id));
  const onDone = () => {
    setChosen(new Set());
    found.refresh();
  };
  return html`<h1 tabindex="-1">Dead letters</h1>
    <p class="lead">Messages that no worker could deal with. They wait here until somebody sends
      them again or deletes them.</p>
    <${Instead} of=${found} empty=${!ids.length}>
      No dead letters${queue && ` in ${queue}`}: nothing needs a decision.</${Instead}>
    ${ids.length > 0 && mayChange &&
    html`<div class="bar"><${BulkBar} actions=${["dead/replay", "dead/delete"]}
      scope=${some.length ? `${number(some.length)} selected` : `All ${number(ids.length)} shown`}
      what=${{ ids: some.length ? some : ids, onDone }} /></div>`}
    ${ids.length > 0 &&
    html`<${Table} label="Dead letters, the newest first" columns=${COLUMNS}
      rows=${found.data.letters} rowKey=${(one) => one.id}
      selection=${mayChange && { chosen, set: setChosen }} />`}
    ${ids.length >= MOST &&
    html`<p class="foot">The newest ${number(MOST)}; there may be more.</p>`}
    ${queue && html`<p><a href="#/dead">Dead letters of all queues</a></p>`}`;
}
