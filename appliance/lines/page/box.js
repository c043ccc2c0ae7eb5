// The box, live: what it does, how much room it has, and which session fares worst.

import { address } from "./call.js";
import { bars, curve, element, html, spark } from "./chart.js";

const at = (id) => document.getElementById(id);
const KEPT = 240;
const LIMITS = { lines: "then slots are taken", time: "then ticks lack time", memory: "then memory is short" };
const histories = new Map(); // box and session -> {tick, margins}
const cards = new Map();

function show(state, words) {
  at("state").dataset.state = state;
  if (at("state").textContent !== words) at("state").textContent = words;
}

const mib = (bytes) => bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : bytes >= 2 ** 20
  ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${(bytes / 1024).toFixed(0)} KiB`;
const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
const ms = (value) => `${value.toFixed(1)} ms`;

function remember(box, session) {
  const key = `${box.name}/${session.session}`;
  const kept = histories.get(key) ?? { tick: session.tick - session.margins.length, margins: [] };
  const fresh = Math.max(0, Math.min(session.margins.length, session.tick - kept.tick));
  if (fresh) kept.margins.push(...session.margins.slice(-fresh).map((v) => v / 10));
  kept.margins.splice(0, Math.max(0, kept.margins.length - KEPT));
  kept.tick = session.tick;
  kept.seen = true;
  histories.set(key, kept);
  return kept.margins;
}

function card(name) {
  if (cards.has(name)) return cards.get(name);
  const part = (title, ...children) => html("section", { class: "panel" }, html("h2", {}, title), ...children);
  const c = {
    root: html("article", { class: "onebox", "aria-label": name }),
    name: html("h1", {}, name.replace(/\.sock$/, "")), trouble: html("p", { class: "alarm", hidden: "" }),
    tiles: html("dl", { class: "tiles" }),
    gauge: html("div", { class: "gauge", role: "img" }), gaugeWords: html("p", { class: "quiet" }),
    histogram: element("svg", { class: "chart", role: "img" }), refusals: html("ul", { class: "chips" }),
    memory: element("svg", { class: "chart", role: "img" }), memoryWords: html("p", { class: "quiet" }),
    rows: html("tbody"), none: html("p", { class: "quiet" }, "Nobody is talking to this box."),
  };
  const head = html("tr");
  for (const title of ["Session", "Line", "Age", "Margin", "Last", "Worst", "Late", "Concealed", "Lag", "Way p50 / p99", "Memory"]) {
    head.append(html("th", { scope: "col" }, title));
  }
  c.table = html("table", { class: "sessions" }, html("caption", { class: "hidden" }, "Live sessions, worst first"),
    html("thead", {}, head), c.rows);
  c.root.append(
    html("div", { class: "title" }, c.name, c.trouble), c.tiles,
    html("div", { class: "panels" },
      part("Headroom", c.gauge, c.gaugeWords, html("h3", {}, "Refused since the start"), c.refusals),
      part("Ticks, by what they took", c.histogram),
      part("Memory, by age", c.memory, c.memoryWords)),
    part("Sessions, worst first", c.none, c.table));
  at("boxes").append(c.root);
  cards.set(name, c);
  return c;
}

function tile(title, value, note = "", bad = false) {
  return html("div", { class: bad ? "bad" : "" }, html("dt", {}, title), html("dd", {}, value, html("small", {}, note)));
}

function draw(box, line) {
  const c = card(box.name);
  c.root.classList.toggle("gone", Boolean(box.trouble));
  const alarms = Object.entries(box.alarms ?? {}).filter(([, count]) => count).map(([what, count]) => `${count} ${what}`);
  const words = box.trouble || alarms.join(" · ");
  c.trouble.hidden = !words;
  c.trouble.textContent = words;
  if (box.trouble) return;
  const period = box.period_ms;
  const state = box.draining ? "draining" : box.ready ? "ready" : "loading";
  c.tiles.replaceChildren(
    tile("State", state, `tick ${box.tick.toLocaleString("en")}`, state !== "ready"),
    tile("Sessions", `${box.live}`, `of ${box.slots} slots`),
    tile("Room for", `${box.free}`, LIMITS[box.limited_by] ?? "", !box.free),
    tile("Margin now", box.live ? ms(box.margin_ms) : "–", `worst ${ms(box.worst_ms)}`, box.live > 0 && box.margin_ms < 0),
    tile("Late ticks", `${box.late}`, `${box.missed} missed`, box.late + box.missed > 0),
    tile("Sent away", `${box.shed}`, "because ticks were late", box.shed > 0));

  const took = box.live ? Math.max(0, period - box.margin_ms) : 0;
  const scale = (v) => `${Math.min(100, (v / period) * 100).toFixed(1)}%`;
  if (!c.gauge.childElementCount) c.gauge.append(html("i", { class: "forecast" }), html("i", { class: "now" }));
  c.gauge.children[0].style.width = scale(box.forecast_ms);
  c.gauge.children[1].style.width = scale(took);
  c.gaugeWords.textContent = `The last tick took ${ms(took)} of ${period} ms; with one session more, one tick in a thousand is forecast to take ${box.forecast_ms ? ms(box.forecast_ms) : "an unknown time"}.`;
  c.gauge.setAttribute("aria-label", c.gaugeWords.textContent);

  const refused = { ...box.refusals };
  const chips = Object.entries(refused).sort((a, b) => b[1] - a[1]);
  c.refusals.replaceChildren(...(chips.length ? chips.map(([why, count]) => html("li", {}, html("b", {}, String(count)), ` ${why}`))
    : [html("li", { class: "quiet" }, "nobody")]));

  const bins = box.histogram.length - 1;
  if (bins > 0) {
    const labels = box.histogram.map((_, i) => i === bins ? `over ${period} ms` : `${((i * period) / bins).toFixed(0)}–${(((i + 1) * period) / bins).toFixed(0)}`);
    bars(c.histogram, box.histogram, labels, bins);
    const total = box.histogram.reduce((a, b) => a + b, 0);
    c.histogram.setAttribute("aria-label", `${total} ticks; ${box.histogram[bins]} took longer than the period`);
  }

  const seconds = (ticks) => (ticks * period) / 1000;
  const memory = line.memory ?? [];
  const owned = box.sessions.reduce((sum, s) => sum + s.bytes, 0);
  const full = memory.at(-1)?.[1] ?? 0;
  curve(c.memory, memory.map(([age, bytes]) => [seconds(age), bytes]),
    box.sessions.map((s) => [seconds(s.age), s.bytes, `session ${s.session}: ${mib(s.bytes)} at ${clock(seconds(s.age))}`]),
    ["just begun", memory.length ? `${clock(seconds(memory.at(-1)[0]))} and older` : ""]);
  c.memoryWords.textContent = `${mib(owned)} owned by ${box.sessions.length} sessions; ${mib(full)} each at full retention.`;
  c.memory.setAttribute("aria-label", c.memoryWords.textContent);

  c.none.hidden = box.sessions.length > 0;
  c.table.hidden = !box.sessions.length;
  c.rows.replaceChildren(...box.sessions.map((s, i) => {
    const margins = remember(box, s);
    const chart = element("svg", { class: "spark", role: "img", "aria-label": `margins of session ${s.session}` });
    spark(chart, margins, { low: -5, high: period, line: 0, most: KEPT });
    const way = line.ways?.[s.session];
    const cell = (title, value, bad) => html("td", { "data-title": title, class: bad ? "bad" : "" }, value);
    return html("tr", { class: i === 0 && box.sessions.length > 1 ? "worst" : "" },
      html("th", { scope: "row", "data-title": "Session" }, String(s.session)),
      cell("Line", s.line), cell("Age", clock(seconds(s.age))),
      html("td", { class: "chart", "data-title": "Margin" }, chart),
      cell("Last", ms(s.margins.at(-1) / 10), s.margins.at(-1) < 0), cell("Worst", ms(s.worst / 10), s.worst < 0),
      cell("Late", String(s.late + s.missed), s.late + s.missed > 0), cell("Concealed", String(s.concealed)),
      cell("Lag", String(s.lag), s.lag > 1),
      cell("Way", way ? `${way.p50_ms.toFixed(0)} / ${way.p99_ms.toFixed(0)} ms` : "–"), cell("Memory", mib(s.bytes)));
  }));
}

function heard(all) {
  show("live", "Live");
  at("model").textContent = all.model;
  at("notice").textContent = all.notice;
  for (const kept of histories.values()) kept.seen = false;
  for (const box of all.boxes) draw(box, all);
  for (const [key, kept] of histories) if (!kept.seen) histories.delete(key);
  for (const [name, c] of cards) if (!all.boxes.some((box) => box.name === name)) { c.root.remove(); cards.delete(name); }
  const refused = Object.entries(all.refused).map(([why, count]) => `${count} ${why}`).join(", ");
  show("live", `Live · ${all.connections} of ${all.most} connections at this line${refused ? ` · it turned away: ${refused}` : ""}`);
}

function watch() {
  const source = new EventSource(address("/api/live"));
  source.onmessage = ({ data }) => heard(JSON.parse(data));
  source.onerror = async () => {
    if (source.readyState !== EventSource.CLOSED) { show("lost", "The line does not answer. Trying again…"); return; }
    const answer = await fetch(address("/api/model")).catch(() => null);
    show("lost", answer?.status === 401 ? "A token is needed: open this page with ?token=… in its address."
      : "This line lets nobody watch right now. Trying again…");
    setTimeout(watch, 5000);
  };
}

watch();
