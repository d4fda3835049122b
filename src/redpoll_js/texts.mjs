// Texts that arrive in parts: joined by their place, and marked where a part is missing. No I/O but timers.

// What `publish_stream` of redpoll-client sends. Each name may be a path with dots, as in a rule's `--join`.
const PUBLISH_STREAM = { id: "stream", delta: "delta", number: "n", length: "length", state: "state" };
const STATES = ["done", "failed", "cancelled"];
const SILENT_AFTER_MS = 30000;

const at = (data, path) => path.split(".").reduce((value, name) => (value == null ? undefined : value[name]), data);

// The texts of one channel, by id. `fields`: where the parts have what; `ends`: the state that an event of a name means.
export class Texts {
  constructor({ fields = {}, ends = {} } = {}) {
    this.fields = { ...PUBLISH_STREAM, ...fields };
    this.ends = ends;
    this.texts = new Map();
  }

  // Takes an event in. `joined`: the server may have joined parts, and none is lost, so numbers may skip.
  // Returns the id of the text that it changed, or null.
  take(event, data, joined) {
    const { fields } = this;
    const id = at(data, fields.id);
    if (typeof id !== "string" && typeof id !== "number") return null;
    const delta = at(data, fields.delta);
    const named = Object.hasOwn(this.ends, event) ? this.ends[event] : at(data, fields.state);
    const state = STATES.includes(named) ? named : null;
    if (typeof delta !== "string" && !state) return null;
    const key = String(id);
    const text = this.texts.get(key) || { text: "", state: "streaming", length: 0, number: -1, missing: false };
    const part = { delta: typeof delta === "string" ? delta : "", state };
    part.number = at(data, fields.number);
    part.length = at(data, fields.length);
    const changed = add(text, part, joined);
    this.texts.set(key, text);
    return changed ? key : null;
  }

  // Parts of the texts that have no end yet are missing.
  gap() {
    for (const text of this.texts.values()) if (text.state === "streaming") text.missing = true;
  }

  // A text has no end yet, and none will come.
  fail(id, reason) {
    const text = this.texts.get(id);
    if (text && text.state === "streaming") Object.assign(text, { state: "failed", reason });
  }

  // What a page shows, in the order in which the texts began.
  list() {
    return Array.from(this.texts, ([id, text]) => {
      const cut = text.missing && (text.state === "streaming" || text.state === "done");
      const shown = { id, text: text.text, state: cut ? "incomplete" : text.state };
      return text.reason ? { ...shown, reason: text.reason } : shown;
    });
  }

  // Whether a text has no end yet.
  isOpen(id) {
    const text = this.texts.get(id);
    return text !== undefined && text.state === "streaming";
  }
}

// Adds a part to a text; false if it has nothing new. `length` is that of the text up to the end of the part, in UTF-16
// units, so the part's beginning is known, also of one that the server joined.
function add(text, part, joined) {
  const { delta, state } = part;
  let fresh = delta;
  if (Number.isInteger(part.length)) {
    const start = part.length - delta.length;
    if (start > text.length) text.missing = true;
    else fresh = delta.slice(text.length - start);
    text.length = Math.max(text.length, part.length);
  } else if (Number.isInteger(part.number)) {
    if (part.number <= text.number) return false;
    if (part.number !== text.number + 1 && !joined) text.missing = true;
    text.length += delta.length;
  }
  if (Number.isInteger(part.number)) text.number = Math.max(text.number, part.number);
  if (fresh) text.text += fresh;
  if (!fresh && !state) return false;
  if (text.reason) {
    // It was given up, and goes on.
    text.state = "streaming";
    delete text.reason;
  }
  if (state && text.state === "streaming") text.state = state;
  return true;
}

// Calls `silent(id)` when nothing came for an open text for so long. Time without a connection doesn't count.
export class Silence {
  constructor(silent, afterMs = SILENT_AFTER_MS) {
    this.silent = silent;
    this.afterMs = afterMs;
    this.timers = new Map();
    this.connected = false;
  }

  // Something came for this text, and it is open or not.
  heard(id, isOpen) {
    clearTimeout(this.timers.get(id));
    if (!isOpen) this.timers.delete(id);
    else this.timers.set(id, this.connected ? this.started(id) : null);
  }

  started(id) {
    if (!Number.isFinite(this.afterMs)) return null;
    return setTimeout(() => {
      this.timers.delete(id);
      this.silent(id);
    }, this.afterMs);
  }

  // A source may report the same state more than once: the time that has passed goes on.
  connection(connected) {
    if (connected === this.connected) return;
    this.connected = connected;
    for (const [id, timer] of this.timers) {
      clearTimeout(timer);
      this.timers.set(id, connected ? this.started(id) : null);
    }
  }

  clear() {
    for (const timer of this.timers.values()) clearTimeout(timer);
    this.timers.clear();
  }
}
