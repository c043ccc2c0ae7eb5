// The page one person talks on: what is shown, and what buttons do. Sound is audio.js, the call call.js.

import { Sound, bestCodec, microphoneTrouble } from "./audio.js";
import { Call, model } from "./call.js";
import { html, spark } from "./chart.js";

const at = (id) => document.getElementById(id);
const KEPT = 120;

let facts = null, sound = null, call = null, began = 0, codec = "pcm";
const margins = [], ways = [];

function show(state, words, detail = "") {
  document.body.dataset.state = state;
  at("state").dataset.state = state;
  if (at("state").textContent !== words) at("state").textContent = words;
  at("detail").textContent = detail;
  const inCall = call !== null;
  at("talk-word").textContent = !inCall ? "Talk" : state === "live" ? "Hang up" : "Stop";
  at("talk").disabled = facts === null && !inCall;
  at("mute").disabled = !inCall;
  for (const id of ["voice", "persona"]) at(id).disabled = inCall;
}

// --- before a call

async function look() {
  try {
    facts = await model();
    at("model").textContent = facts.model;
    at("notice").textContent = facts.notice;
    codec = new URLSearchParams(location.search).get("codec") === "pcm" ? "pcm" : await bestCodec();
    at("voice-row").hidden = !facts.voices.length;
    at("persona-row").hidden = !facts.persona;
    at("who").hidden = !facts.voices.length && !facts.persona;
    // Made again only when it must be: this looks every few seconds, and the list may be open.
    if (at("voice").dataset.names !== facts.voices.join()) {
      at("voice").dataset.names = facts.voices.join();
      at("voice").replaceChildren(
        html("option", { value: "" }, "The model's own"),
        ...facts.voices.map((name) => html("option", { value: name }, name)));
    }
    // Why a call ended stays to be read until the next one.
    if (call || !["starting", "ready", "loading", "lost", "over"].includes(document.body.dataset.state)) return;
    if (facts.trouble) show("loading", "The box is not ready.", facts.trouble.replace(/^\w+: /, ""));
    else if (!window.isSecureContext) show("refused", "No microphone here.", microphoneTrouble());
    else show("ready", "Ready when you are.", facts.most <= facts.open ? "All connections are taken right now." : "");
  } catch (err) {
    if (!call) { facts = null; show("lost", err.message, "Looking again every few seconds."); }
  }
}

// --- in a call

function rest() {
  call?.hangUp();
  call = null;
  sound?.close();
  sound = null;
  at("again").hidden = true;
  shown.you = shown.them = 0;
  level("you", 0);
  level("them", 0);
}

async function talk() {
  if (call) {
    rest();
    paragraph = null;
    show("over", "The call is over.", "");
    at("talk").focus();
    return;
  }
  const trouble = (words) => { rest(); show("fault", "The call ended.", words); };
  const mine = (sound = new Sound({
    codec, onSend: (bytes) => call?.send(bytes), onLevel: level, onTrouble: trouble,
  }));
  call = new Call(codec, wish(), {
    state: changed,
    audio: (bytes) => sound?.hear(bytes),
    text: said,
    told,
    notes: (notes) => line(notes.join("; "), "note"),
  });
  show("connecting", "Asking for the microphone…");
  try {
    await sound.open();
  } catch (err) {
    if (sound !== mine) return; // stopped meanwhile
    rest();
    show("refused", "No microphone.", microphoneTrouble(err));
    return;
  }
  if (sound === mine) call.start();
}

const wish = () => ({ voice_prompt: at("voice").value, text_prompt: at("persona").value.trim() });

let retry = 0;
function changed(state, words, detail, retryS) {
  clearInterval(retry);
  at("again").hidden = retryS === undefined;
  if (state === "live") {
    began = performance.now();
    margins.length = ways.length = 0;
    if (at("transcript").querySelector(".words")) line("New call", "note");
    paragraph = null;
    sound.begin();
  } else if (state !== "connecting") sound?.end();
  if (retryS !== undefined) {
    const until = performance.now() + retryS * 1000;
    const tell = () => {
      const left = Math.max(0, Math.ceil((until - performance.now()) / 1000));
      show(state, words, [detail, `Trying again${left ? ` in ${left} s` : ""}; a new call begins from nothing.`].filter(Boolean).join(" · "));
    };
    tell();
    retry = setInterval(tell, 1000);
    return;
  }
  if (state !== "connecting" && state !== "live") rest();
  show(state, words, detail);
}

setInterval(() => {
  if (!call?.live) return;
  const s = Math.floor((performance.now() - began) / 1000);
  at("detail").textContent = `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")} · ${codec === "opus" ? "Opus" : "PCM"}`;
}, 500);

// --- what is shown of it

let paragraph = null, lastWord = 0, paragraphAt = 0;
function line(words, kind) {
  at("transcript").querySelector(".empty")?.remove();
  const made = html("p", { class: kind }, words);
  at("transcript").append(made);
  while (at("transcript").childElementCount > 400) at("transcript").firstElementChild.remove();
  scrollDown();
  return made;
}
function said(words) {
  const now = performance.now();
  // After a pause; and who talks without one gets a time to find it by, at a word's beginning.
  const long = now - paragraphAt > 20_000 && words.startsWith(" ");
  if (!paragraph || now - lastWord > 2000 || long) {
    paragraphAt = now;
    const s = Math.floor((now - began) / 1000);
    paragraph = line("", "words");
    paragraph.append(html("time", {}, `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`), html("span"));
    words = words.trimStart();
  }
  lastWord = now;
  paragraph.lastElementChild.append(words);
  paragraph.lastElementChild.normalize();
  scrollDown();
}
let follows = true; // whoever has scrolled up reads there
function scrollDown() {
  if (follows) at("transcript").scrollTop = at("transcript").scrollHeight;
}
at("transcript").addEventListener("scroll", ({ target }) => {
  follows = target.scrollHeight - target.scrollTop - target.clientHeight < 120;
});
new ResizeObserver(scrollDown).observe(at("transcript")); // a phone was turned

function told(pulse) {
  margins.push(...pulse.margins_ms);
  ways.push(...pulse.ways_ms);
  for (const list of [margins, ways]) list.splice(0, Math.max(0, list.length - KEPT));
  const period = facts?.period_ms ?? 80;
  spark(at("margin-line"), margins, { low: -5, high: period, line: 0, most: KEPT });
  spark(at("way-line"), ways, { low: 0, high: 250, most: KEPT });
  const last = (list) => (list.length ? `${list.at(-1).toFixed(0)} ms` : "–");
  at("margin").textContent = last(margins);
  at("way").textContent = last(ways);
  at("lag").textContent = pulse.lag_frames;
  for (const name of ["frames", "late", "concealed", "filled"]) at(name).textContent = pulse[name];
}

const shown = { you: 0, them: 0 };
let spokenLevel = 0;
function level(who, peak, playout) {
  const db = peak > 0 ? Math.max(0, 1 + (20 * Math.log10(peak)) / 50) : 0; // -50 dB .. 0 dB
  shown[who] = Math.max(db, shown[who] * 0.85 - 0.005, 0);
  at(who).style.setProperty("--level", shown[who].toFixed(3));
  document.querySelector(`.ring.${who === "you" ? "you" : "model"}`).style.setProperty("--level", shown[who].toFixed(3));
  if (performance.now() - spokenLevel > 1000) {
    spokenLevel = performance.now();
    for (const id of ["you", "them"]) at(id).setAttribute("aria-valuenow", Math.round(shown[id] * 100));
  }
  if (playout) {
    at("dry").textContent = playout.dry;
    document.body.dataset.heard = playout.got;
    document.body.dataset.spare = playout.spare; // ms
  }
}

// --- buttons and keys

function mute() {
  if (!sound) return;
  sound.muted = !sound.muted;
  at("mute").setAttribute("aria-pressed", sound.muted);
  at("mute").firstChild.textContent = sound.muted ? "Muted " : "Mute ";
}

at("talk").addEventListener("click", () => {
  at("mute").setAttribute("aria-pressed", "false");
  at("mute").firstChild.textContent = "Mute ";
  talk();
});
at("mute").addEventListener("click", mute);
at("again").addEventListener("click", () => call?.start());
document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key.toLowerCase() === "m" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) mute();
});
addEventListener("pagehide", rest);

for (const id of ["margin-line", "way-line"]) spark(at(id), [], { low: 0, high: 1 });
show("starting", "Looking for the box…");
look();
setInterval(() => { if (!call) look(); }, 5000);
