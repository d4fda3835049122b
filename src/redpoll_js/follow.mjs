// The texts of a channel, followed over a source until they are closed.
import { isOfClient, sourceOf } from "./sources.mjs";
import { Silence, Texts } from "./texts.mjs";

// Calls `changed(view)` with `{ texts, caughtUp, connected, error }` after each change. `options`: `event` (a name, or
// names, of the events that carry parts; by default all but client events), `fields`, `ends`, `silenceMs`.
// Returns `{ view(), close() }`.
export function followTexts(source, channel, options = {}, changed = () => {}) {
  const names = [options.event ?? [], Object.keys(options.ends || {})].flat(2);
  const isFollowed = (event) => names.includes(event) || (options.event === undefined && !isOfClient(event));
  let texts = new Texts(options);
  // From before a restart, until they come again.
  let former = [];
  let view = { texts: [], caughtUp: false, connected: false, error: null };
  let isClosed = false;
  let isScheduled = false;

  // Events that come together change the page once.
  function show(more) {
    view = { ...view, ...more, texts: null };
    if (isScheduled) return;
    isScheduled = true;
    queueMicrotask(() => {
      isScheduled = false;
      if (!isClosed) changed(current());
    });
  }

  function current() {
    if (view.texts) return view;
    const present = texts.list();
    const known = new Set(present.map(({ id }) => id));
    view = { ...view, texts: [...former.filter(({ id }) => !known.has(id)), ...present] };
    return view;
  }

  const silence = new Silence((id) => {
    texts.fail(id, "nothing came any more");
    show({});
  }, options.silenceMs);

  const stop = sourceOf(source).follow(channel, {
    message(event, data, joined) {
      if (!isFollowed(event)) return;
      const id = texts.take(event, data, joined);
      if (id === null) return;
      silence.heard(id, texts.isOpen(id));
      show({});
    },
    caughtUp: () => show({ caughtUp: true }),
    connection(connected) {
      if (connected === view.connected) return;
      silence.connection(connected);
      // After a refusal it was asked again, and may be read now.
      show(connected ? { connected, error: null } : { connected });
    },
    gap() {
      texts.gap();
      show({});
    },
    restart() {
      former = current().texts.map((text) => (text.state === "streaming" ? { ...text, state: "incomplete" } : text));
      texts = new Texts(options);
      silence.clear();
      show({});
    },
    failed(error) {
      silence.clear();
      for (const { id } of texts.list()) texts.fail(id, error.message);
      show({ error, connected: false });
    },
  });

  return {
    view: current,
    close() {
      isClosed = true;
      silence.clear();
      stop();
    },
  };
}
