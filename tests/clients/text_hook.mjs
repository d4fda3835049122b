// A component with redpoll-js' useText, in strict mode, for the page of tests/matrix. What it shows goes to `say`.
import { createElement, StrictMode, useEffect } from "react";
import { createRoot } from "react-dom/client";
import redpoll from "redpoll-js";
import { useText } from "redpoll-js/react";

// Over pusher-js, or over HTTP with the options of `streamSource`. Returns what takes it away.
export function showText({ client, channel, key, options, stream }, say) {
  const pusher = stream ? null : redpoll(new window.Pusher(key, options));
  const source = pusher ?? redpoll.streamSource(stream);
  function Shown() {
    const { text, state } = useText(channel, { source });
    useEffect(() => { say({ client, event: "shown", data: { text, state } }); }, [text, state]);
    return null;
  }
  const root = createRoot(document.createElement("div"));
  root.render(createElement(StrictMode, null, createElement(Shown)));
  return () => {
    root.unmount();
    pusher?.disconnect();
  };
}
