// The pages of test_redpoll_js.py: the example's conversation, and each hook. The query says which, and over what.
import { StrictMode, useEffect, useState } from "react";
import { createRoot } from "react-dom/client";
import redpoll from "redpoll-js";
import { RedpollProvider, useChannel, usePresence, useText } from "redpoll-js/react";
import Chat, { Devices } from "./app/chat.jsx";
import { connect } from "./app/connect.js";

const query = new URLSearchParams(location.search);
const chat = query.get("chat");

function News() {
  const [goals, setGoals] = useState([]);
  const { status } = useChannel("news", { goal: ({ text }) => setGoals((former) => [...former, text]) });
  return <p id="news" data-state={status}>{goals.join(" ")}</p>;
}

function Refused() {
  const { status, error } = useChannel("private-of-others");
  return <p id="refused" data-state={status}>{error?.message}</p>;
}

function Members() {
  const { status, members, me, count } = usePresence("presence-chat-room");
  const mine = members.some(({ id }) => id === me?.id);
  return <p id="members" data-state={status}>{`${count} ${mine ? members[0].info.name : ""}`}</p>;
}

function Text({ id, channel, source }) {
  const { text, state, reason, texts } = useText(channel, { event: "answer", source });
  return <pre id={id} data-state={state} data-texts={texts.length} title={reason ?? ""}>{text}</pre>;
}

function Hooks({ overHttp }) {
  const [isShown, setShown] = useState(true);
  return (
    <>
      <button id="toggle" onClick={() => setShown(!isShown)}>toggle</button>
      {isShown && <News />}
      <Refused />
      <Members />
      <Text id="text" channel="private-chat-text" />
      <Text id="again" channel="private-chat-text" />
      <Text id="http" channel="private-chat-text" source={overHttp} />
    </>
  );
}

function Page({ settings }) {
  const [client, setClient] = useState(null);
  const [overHttp] = useState(() => redpoll.streamSource(settings));
  useEffect(() => {
    let made = null;
    connect().then((pusher) => setClient((made = pusher)));
    return () => made?.disconnect();
  }, []);
  if (!client) return null;
  const source = query.get("over") === "http" ? overHttp : client;
  const silenceMs = query.has("silence") ? Number(query.get("silence")) : undefined;
  return (
    <RedpollProvider source={client}>
      {chat ? <Chat id={chat} source={source} silenceMs={silenceMs} /> : <Hooks overHttp={overHttp} />}
      {chat && <Devices id={chat} />}
    </RedpollProvider>
  );
}

const settings = await (await fetch("/settings.json")).json();
const page = <Page settings={settings} />;
createRoot(document.getElementById("root")).render(query.has("strict") ? <StrictMode>{page}</StrictMode> : page);
