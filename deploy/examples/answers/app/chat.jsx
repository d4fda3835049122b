"use client";
import { useChat } from "@ai-sdk/react";
import { useEffect, useMemo, useState } from "react";
import { RedpollChatTransport } from "redpoll-js/ai";
import { usePresence } from "redpoll-js/react";

async function load(id) {
  const response = await fetch(`/api/chats/${id}`);
  if (!response.ok) throw new Error("The back end is away.");
  return response.json();
}

// A conversation. What is stored is loaded after the channel's answers are known, so no answer falls between the two.
export default function Chat({ id, source, silenceMs }) {
  const transport = useMemo(
    () => new RedpollChatTransport({ source, channel: (chat) => `private-chat-${chat}`, silenceMs }),
    [source, silenceMs],
  );
  const [messages, setMessages] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    let isGone = false;
    transport
      .ready(id)
      .then(() => load(id))
      .then((saved) => isGone || setMessages(saved), (reason) => isGone || setError(reason));
    return () => {
      isGone = true;
    };
  }, [transport, id]);
  if (error) return <p role="alert">{error.message}</p>;
  return messages ? <Conversation id={id} stored={messages} transport={transport} /> : <p>Loading…</p>;
}

const textOf = ({ parts }) => parts.filter(({ type }) => type === "text").map(({ text }) => text).join("");

// "done", "streaming", "failed" or "cancelled".
function stateOf(message, isLast, status) {
  if (isLast && (status === "streaming" || status === "submitted")) return "streaming";
  if (isLast && status === "error") return "failed";
  return message.metadata?.state ?? "done";
}

function Conversation({ id, stored, transport }) {
  const chat = useChat({ id, messages: stored, transport, resume: true });
  const { messages, setMessages, sendMessage, resumeStream, status, error } = chat;
  const [text, setText] = useState("");
  // Another page asked something: its question, and the answer as it comes.
  useEffect(
    () =>
      transport.watch(id, async () => {
        const saved = await load(id).catch(() => null);
        if (saved) setMessages(saved);
        await resumeStream();
      }),
    [transport, id, setMessages, resumeStream],
  );

  function send(event) {
    event.preventDefault();
    sendMessage({ text });
    setText("");
  }

  const isBusy = status === "streaming" || status === "submitted";
  return (
    <main style={{ paddingBottom: "3rem" }}>
      {messages.map((message, number) => {
        const state = stateOf(message, number === messages.length - 1, status);
        return (
          <article key={message.id} data-role={message.role} data-state={message.role === "user" ? null : state}>
            <p style={{ whiteSpace: "pre-wrap" }}>{textOf(message)}</p>
            {state === "failed" && message.role === "assistant" && <small>The answer is not complete.</small>}
            {state === "cancelled" && <small>Stopped.</small>}
          </article>
        );
      })}
      {error && <p role="alert">{error.message}</p>}
      {/* It stays where it is while an answer grows: a click on a button that moves is lost. */}
      <form onSubmit={send} style={{ position: "fixed", bottom: "1rem" }}>
        <input aria-label="Message" value={text} onChange={(event) => setText(event.target.value)} />
        <button disabled={isBusy || !text}>Send</button>
        <button type="button" disabled={!isBusy} onClick={() => fetch(`/api/chats/${id}/stop`, { method: "POST" })}>
          Stop
        </button>
      </form>
    </main>
  );
}

// How many pages show this chat.
export function Devices({ id }) {
  const { count } = usePresence(`presence-chat-${id}`);
  return <p>{count} open</p>;
}
