// A ChatTransport for useChat of the AI SDK: answers come over a channel. ai.d.mts documents it.
import { isOfClient, sourceOf } from "./sources.mjs";
import { Silence, Texts } from "./texts.mjs";

const READY_WITHIN_MS = 10000;
// How long a chat that nothing uses is followed on.
const IDLE_MS = 30000;
const ENDS = ["finish", "abort", "error"];
const DELTAS = { "text-delta": "delta", "reasoning-delta": "delta", "tool-input-delta": "inputTextDelta" };

const valueOf = (option) => (typeof option === "function" ? option() : option);
const stopped = () => new DOMException("stopped", "AbortError");

// One answer: its chunks so far, with deltas that follow each other joined, and the streams that read it.
class Answer {
  constructor(id) {
    this.id = id;
    this.chunks = [];
    this.ended = false;
    // Each with the function that releases it, once.
    this.readers = new Map();
    // Of a text: how much of it is in the chunks.
    this.taken = 0;
    // How many chunks came before it was given up, because nothing came.
    this.silentAt = null;
  }

  add(chunk) {
    if (this.ended) return;
    const last = this.chunks[this.chunks.length - 1];
    const delta = DELTAS[chunk.type];
    const id = chunk.id ?? chunk.toolCallId;
    if (delta && last && last.type === chunk.type && (last.id ?? last.toolCallId) === id) {
      this.chunks[this.chunks.length - 1] = { ...last, ...chunk, [delta]: last[delta] + chunk[delta] };
    } else {
      this.chunks.push(chunk);
    }
    for (const reader of this.readers.keys()) reader.enqueue(chunk);
    if (ENDS.includes(chunk.type)) this.end();
  }

  end() {
    this.ended = true;
    for (const [reader, release] of this.readers) {
      reader.close();
      release();
    }
  }

  // The page leaves the chat: what reads this answer ends as if it was stopped.
  leave() {
    for (const [reader, release] of this.readers) {
      reader.error(stopped());
      release();
    }
  }

  fail(errorText) {
    if (this.ended) return;
    if (this.taken) this.add({ type: "text-end", id: "text" });
    this.add({ type: "message-metadata", messageMetadata: { state: "failed" } });
    this.add({ type: "error", errorText });
  }

  giveUp() {
    this.silentAt = this.chunks.length;
    this.fail("nothing came any more");
  }

  // The same answer, before it was given up.
  goesOn() {
    const answer = new Answer(this.id);
    answer.chunks = this.chunks.slice(0, this.silentAt);
    answer.taken = this.taken;
    return answer;
  }

  // A stream of all chunks from the first on. Calls `released` once, when it no longer reads this answer.
  read(signal, released) {
    let reader;
    const abort = () => {
      reader.error(stopped());
      release();
    };
    const release = () => {
      // A stream that still has chunks can be cancelled after its end.
      if (!this.readers.delete(reader)) return;
      signal?.removeEventListener("abort", abort);
      released();
    };
    return new ReadableStream({
      start: (controller) => {
        reader = controller;
        for (const chunk of this.chunks) controller.enqueue(chunk);
        if (this.ended) {
          controller.close();
          return released();
        }
        this.readers.set(controller, release);
        signal?.addEventListener("abort", abort, { once: true });
        return undefined;
      },
      cancel: release,
    });
  }
}

// The answers of one chat's channel.
class Chat {
  constructor(source, channel, { silenceMs }, watchers, idle) {
    this.answers = new Map();
    this.texts = new Texts();
    this.watchers = watchers;
    // Requests for answers under way, and the answers that began meanwhile: one of them may be what was asked for.
    this.asking = 0;
    this.begun = [];
    // What waits for this chat, beside watchers and the streams that read answers.
    this.uses = 0;
    this.isClosed = false;
    // Answers that are no news to the watchers: of this page, or announced.
    this.known = new Set();
    // Answers that aren't resumed after their end. They ended before the chat had caught up, so the page loads them, or a
    // stream of this page has read the end. One without its beginning would replace what the page has of it.
    this.settled = new Set();
    this.error = null;
    this.idle = idle;
    this.isCaughtUp = false;
    this.ready = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
    // Those who wait for `ready` get the error.
    this.ready.catch(() => {});
    this.silence = new Silence((id) => this.answers.get(id)?.giveUp(), silenceMs);
    this.stop = source.follow(channel, this);
    this.touch();
  }

  // -- a listener of sources.mjs

  message(event, data, joined) {
    if (isOfClient(event) || typeof data !== "object" || data === null) return;
    const { stream, n, ...chunk } = data;
    if (typeof chunk.type === "string" && typeof stream === "string") this.takeChunk(stream, chunk);
    else this.takeText(this.texts.take(event, data, joined));
  }

  caughtUp() {
    this.isCaughtUp = true;
    this.settle();
    this.resolve();
  }

  // What the page loads from here on has the answers that have ended.
  settle() {
    for (const { id, ended } of this.answers.values()) if (ended) this.settled.add(id);
  }

  connection(connected) {
    this.silence.connection(connected);
  }

  gap() {
    this.texts.gap();
    for (const [id, answer] of this.answers) {
      const { ended } = answer;
      answer.fail("parts of the answer are missing");
      // If the rest is still stored, the answer comes once more, and watchers hear of it.
      if (!ended) this.renew(id);
      this.silence.heard(id, false);
    }
  }

  restart() {
    const former = this.answers;
    for (const [id, answer] of former) if (answer.ended && answer.chunks.at(-1).type !== "error") this.known.add(id);
    this.answers = new Map();
    this.texts = new Texts();
    for (const [id, answer] of former) {
      // It has been asked for, and nothing of it has come.
      if (!answer.ended && !answer.chunks.length) this.answers.set(id, answer);
    }
  }

  failed(error) {
    this.error = error;
    this.reject(error);
    for (const answer of this.answers.values()) answer.fail(error.message);
    this.silence.clear();
  }

  // -- answers

  answer(id) {
    let answer = this.answers.get(id);
    const isSilent = answer !== undefined && answer.silentAt !== null;
    if (!answer || isSilent) {
      // One that was given up and goes on is news again.
      if (isSilent) this.renew(id);
      answer = isSilent ? answer.goesOn() : new Answer(id);
      this.answers.set(id, answer);
      if (this.isCaughtUp) this.announce(id);
    }
    return answer;
  }

  // This answer is news to the watchers, and may be resumed, although it had ended.
  renew(id) {
    this.known.delete(id);
    this.settled.delete(id);
  }

  takeChunk(id, chunk) {
    const answer = this.answer(id);
    if (!answer.chunks.length && chunk.type !== "start") {
      answer.fail("the beginning of the answer is no longer stored");
      this.settled.add(id);
    } else {
      answer.add(chunk.type === "start" ? { messageId: id, ...chunk } : chunk);
    }
    this.silence.heard(id, !answer.ended);
  }

  takeText(id) {
    if (id === null) return;
    const { text, state } = this.texts.list().find((one) => one.id === id);
    const answer = this.answer(id);
    if (!answer.chunks.length) answer.add({ type: "start", messageId: id });
    if (state === "incomplete") {
      answer.fail("parts of the answer are missing");
      if (!answer.taken) this.settled.add(id);
    }
    if (!answer.taken && text) answer.add({ type: "text-start", id: "text" });
    if (text.length > answer.taken) {
      answer.add({ type: "text-delta", id: "text", delta: text.slice(answer.taken) });
      answer.taken = text.length;
    }
    if (state === "failed") answer.fail("the answer failed");
    if (state === "cancelled" || state === "done") {
      if (answer.taken) answer.add({ type: "text-end", id: "text" });
      if (state === "cancelled") answer.add({ type: "message-metadata", messageMetadata: { state } });
      answer.add({ type: state === "done" ? "finish" : "abort" });
    }
    this.silence.heard(id, !answer.ended);
  }

  announce(id) {
    if (this.asking) return this.begun.push(id);
    if (this.known.has(id)) return undefined;
    this.known.add(id);
    for (const watcher of this.watchers) watcher(id);
    return undefined;
  }

  // The answer with this id, which a request of this page began.
  asked(id) {
    this.known.add(id);
    const answer = this.answer(id);
    if (!answer.ended) this.silence.heard(id, true);
    return answer;
  }

  async whileAsking(ask) {
    this.asking += 1;
    try {
      return await ask();
    } finally {
      this.asking -= 1;
      if (!this.asking) for (const id of this.begun.splice(0)) this.announce(id);
    }
  }

  // The answer to resume: the latest one under way, or else the newest one, if it ended before a stream could read it.
  // Older ones are behind it in the page's list.
  active() {
    const begun = Array.from(this.answers.values()).filter((answer) => answer.chunks.length);
    const newest = begun.at(-1);
    return begun.findLast(({ ended }) => !ended) ?? (newest && !this.settled.has(newest.id) ? newest : undefined);
  }

  read(answer, signal) {
    if (this.isClosed || signal?.aborted) throw stopped();
    clearTimeout(this.timer);
    return answer.read(signal, () => {
      if (answer.ended) this.settled.add(answer.id);
      this.touch();
    });
  }

  // Ends this chat later, if nothing uses it by then.
  touch() {
    clearTimeout(this.timer);
    if (this.isClosed) return;
    this.timer = setTimeout(() => {
      const isRead = Array.from(this.answers.values()).some((answer) => answer.readers.size);
      if (!isRead && !this.watchers.size && !this.uses) this.idle();
    }, IDLE_MS);
  }

  // Calls `use`, and isn't idle before its promise is settled.
  async whileUsed(use) {
    this.uses += 1;
    try {
      return await use();
    } finally {
      this.uses -= 1;
      this.touch();
    }
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.reject(stopped());
    for (const answer of this.answers.values()) answer.leave();
    this.silence.clear();
    this.stop();
  }
}

async function within(promise, signal, afterMs) {
  let timer;
  let abort;
  const ends = new Promise((_, reject) => {
    if (afterMs) timer = setTimeout(() => reject(new Error(`no connection within ${afterMs / 1000} s`)), afterMs);
    abort = () => reject(stopped());
    if (signal?.aborted) abort();
    signal?.addEventListener("abort", abort);
  });
  try {
    return await Promise.race([promise, ends]);
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", abort);
  }
}

export class RedpollChatTransport {
  // A resumed answer comes from its beginning.
  resumeStreamIsReplay = true;

  constructor({ source, channel = (chatId) => `chat-${chatId}`, api = "/api/chat", ...options }) {
    this.source = sourceOf(source);
    this.channel = channel;
    this.api = api;
    this.options = options;
    this.chats = new Map();
    this.close = this.close.bind(this);
  }

  async sendMessages({ trigger, chatId, messageId, messages, abortSignal, headers, body }) {
    const chat = this.chat(chatId);
    return chat.whileUsed(async () => {
      await within(chat.ready, abortSignal, READY_WITHIN_MS);
      const stream = await chat.whileAsking(async () => {
        const id = await this.ask({ ...body, id: chatId, messages, trigger, messageId }, headers, abortSignal);
        chat.known.add(id);
        return id;
      });
      return chat.read(chat.asked(stream), abortSignal);
    });
  }

  async reconnectToStream({ chatId, abortSignal }) {
    const chat = this.chat(chatId);
    return chat.whileUsed(async () => {
      await within(chat.ready, abortSignal);
      const answer = chat.active();
      return answer ? chat.read(answer, abortSignal) : null;
    });
  }

  async ready(chatId) {
    const chat = this.chat(chatId);
    await chat.whileUsed(() => chat.ready);
    chat.settle();
  }

  watch(chatId, began) {
    const chat = this.chat(chatId);
    const watcher = (id) => began(id);
    chat.watchers.add(watcher);
    return () => {
      chat.watchers.delete(watcher);
      this.chats.get(chatId)?.touch();
    };
  }

  close() {
    for (const chat of this.chats.values()) chat.close();
    this.chats.clear();
  }

  chat(chatId) {
    let chat = this.chats.get(chatId);
    if (!chat || chat.error) {
      // After a refusal the channel is asked for again, and those who watch go on.
      const watchers = chat?.watchers || new Set();
      chat?.close();
      const idle = () => {
        this.chats.delete(chatId);
        chat.close();
      };
      chat = new Chat(this.source, this.channel(chatId), this.options, watchers, idle);
      this.chats.set(chatId, chat);
    }
    chat.touch();
    return chat;
  }

  // Asks the back end for an answer. Returns the id of its stream.
  async ask(body, headers, signal) {
    const { options, api } = this;
    const ask = options.fetch || fetch;
    const all = new Headers(valueOf(options.headers));
    for (const [name, value] of new Headers(headers)) all.set(name, value);
    all.set("Content-Type", "application/json");
    const response = await ask(api, {
      method: "POST",
      headers: all,
      body: JSON.stringify({ ...valueOf(options.body), ...body }),
      credentials: options.credentials || "same-origin",
      signal,
    });
    if (!response.ok) throw new Error((await response.text()) || `${api} answered ${response.status}`);
    const { stream } = await response.json();
    if (typeof stream !== "string") throw new Error(`${api} must answer with JSON: {"stream": ID}`);
    return stream;
  }
}
