// One call over /api/chat, from the wish to its end, and when to try again.
//
// First byte of a message: 0 handshake, 1 audio, 2 text, 4 JSON, 5 error, 6 ping.

const ENDINGS = {
  1000: ["over", "The call is over."],
  1003: ["fault", "The box could not read this page's audio."],
  1008: ["refused", "The box ended the call."],
  1011: ["fault", "The box failed."],
  1012: ["draining", "The box finishes its calls and restarts."],
  1013: ["full", "The box is full."],
  1014: ["loading", "The box is loading its model."],
};
const LOST = ["lost", "The connection was lost."];
/** Seconds before the next attempt; states that are not here are for the person to decide. */
const AGAIN_S = { full: [5], loading: [2], draining: [3, 5], lost: [0.2, 1, 2, 4, 8] };
const MOST_TRIES = 60;

const token = (() => {
  const here = new URL(location.href);
  const given = here.searchParams.get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    here.searchParams.delete("token");
    history.replaceState(null, "", here); // not to be seen, nor kept in the history
  }
  return sessionStorage.getItem("token") ?? "";
})();

export function address(path, query = {}) {
  const url = new URL(path, location.href);
  for (const [name, value] of Object.entries({ ...query, token })) {
    if (value !== "") url.searchParams.set(name, value);
  }
  return url;
}

/** JSON of /api/model. Throws with words for a person. */
export async function model() {
  let answer;
  try {
    answer = await fetch(address("/api/model"));
  } catch {
    throw new Error("The line does not answer.");
  }
  if (answer.status === 401) throw new Error("A token is needed: open this page with ?token=… in its address.");
  if (!answer.ok) throw new Error((await answer.text()).trim() || `HTTP ${answer.status}`);
  return answer.json();
}

export class Call {
  #socket = null;
  #timer = 0;
  #tries = 0;
  #error = "";
  /** on: {state(name, words, detail, retryS), audio(bytes), text(words), told(json), notes(list)} */
  constructor(codec, wish, on) {
    Object.assign(this, { codec, wish, on, live: false });
  }

  start() {
    clearTimeout(this.#timer);
    this.#error = "";
    const url = address("/api/chat", this.wish);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = (this.#socket = new WebSocket(url, [`duplexbox.${this.codec}`]));
    socket.binaryType = "arraybuffer";
    this.on.state("connecting", "Connecting…", "");
    socket.onopen = () => {
      const words = this.wish.text_prompt ? "The model reads its persona…" : "Waiting for a slot…";
      this.on.state("connecting", words, "");
    };
    socket.onmessage = ({ data }) => this.#receive(new Uint8Array(data));
    socket.onclose = (event) => socket === this.#socket && this.#closed(event);
  }

  send(payload) {
    const socket = this.#socket;
    // What a stalled network did not take is old news; the box conceals what is missing.
    if (!this.live || socket?.readyState !== WebSocket.OPEN || socket.bufferedAmount > 64000) return;
    const message = new Uint8Array(payload.length + 1);
    message[0] = 1;
    message.set(payload, 1);
    socket.send(message);
  }

  hangUp() {
    clearTimeout(this.#timer);
    this.live = false;
    const socket = this.#socket;
    this.#socket = null;
    socket?.close(1000);
  }

  #receive(message) {
    const payload = message.subarray(1);
    const words = () => new TextDecoder().decode(payload);
    switch (message[0]) {
      case 0:
        this.live = true;
        this.#tries = 0;
        this.on.state("live", "Live", "");
        break;
      case 1: this.on.audio(payload); break;
      case 2: this.on.text(words()); break;
      case 4: {
        const { pulse, notes } = JSON.parse(words());
        if (pulse) this.on.told(pulse);
        if (notes) this.on.notes(notes);
        break;
      }
      case 5: this.#error = words(); break;
    }
  }

  #closed({ code, reason }) {
    this.live = false;
    this.#socket = null;
    const [name, words] = ENDINGS[code] ?? LOST;
    const said = (reason || this.#error).replace(/^\w+(: )?/, "");
    const waits = AGAIN_S[name];
    if (!waits || ++this.#tries > MOST_TRIES) {
      this.on.state(name, words, said);
      return;
    }
    const wait = waits[Math.min(this.#tries, waits.length) - 1];
    this.on.state(name, words, said, wait);
    this.#timer = setTimeout(() => this.start(), wait * 1000);
  }
}
