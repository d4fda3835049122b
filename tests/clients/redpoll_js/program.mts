// Uses everything that the package has, for `tsc --strict`. It isn't run.
import { useChat } from "@ai-sdk/react";
import type { ChatTransport, UIMessage } from "ai";
import Pusher from "pusher-js";
import type { Channel } from "pusher-js";
import redpoll, { authorizer, followTexts, redpoll as named, streamSource } from "redpoll-js";
import type { FollowedTexts, GrowingText, HistoryPage, Listener, Position, Source, TextState } from "redpoll-js";
import { RedpollChatTransport } from "redpoll-js/ai";
import { RedpollProvider, useChannel, usePresence, useText } from "redpoll-js/react";
import { createElement } from "react";
import type { ReactNode } from "react";

const customHandler = redpoll.authorizer({ endpoint: "/auth", headers: () => ({ "X-Page": "1" }), params: { a: "b" } });
const stock = new Pusher("KEY", { cluster: "any", channelAuthorization: { customHandler, endpoint: "", transport: "ajax" } });
const pusher = redpoll(stock);
export const same: typeof named = redpoll;
export const handler: ReturnType<typeof authorizer> = authorizer({ endpoint: "/auth" });

// What it returns is a Pusher still, and knows what it got.
const channel: Channel = pusher.subscribe("news", { rewind: { count: 20 } });
pusher.subscribe("news", { rewind: { seconds: 60 } }).bind("goal", () => {});
const plain: Pusher = pusher;
const position: Position | null = pusher.position("news");
if (position) pusher.subscribe("news", { since: position });
const page: Promise<HistoryPage> = pusher.history("news", { limit: 10, before: "e:1" });
page.then(({ messages, next }) => `${messages.map(({ data }) => data.length)} ${next?.length}`);
// @ts-expect-error: either one
pusher.subscribe("news", { rewind: { count: 1 }, since: { epoch: "e", offset: 1 } });
// @ts-expect-error: not wrapped
followTexts(stock, "answers");
// @ts-expect-error: no such option
pusher.history("news", { limits: 3 });

const http: Source = streamSource({ server: "https://a.example", app: "1", token: async (name) => `token of ${name}` });
const following: FollowedTexts = followTexts(
  pusher,
  "answers",
  { event: ["text_delta"], fields: { id: "message_id", delta: "delta" }, ends: { stream_end: "done" }, silenceMs: 5000 },
  ({ texts, caughtUp, connected, error }) => {
    const [first]: GrowingText[] = texts;
    const state: TextState | undefined = first?.state;
    return [state, caughtUp, connected, error?.message];
  },
);
following.close();
const own: Source = {
  follow(name: string, listener: Listener) {
    listener.message(name, {}, false);
    return () => listener.failed(new Error("ended"));
  },
};

export function Hooks(): ReactNode {
  const { channel, status, error } = useChannel("news", { goal: (data: { text: string }, metadata) => [data.text, metadata?.user_id] });
  const { members, me, count } = usePresence<{ name: string }>("presence-room", { source: pusher });
  const { text, state, id, reason, texts, caughtUp } = useText("answers", { stream: "a", source: http, event: "answer" });
  // @ts-expect-error: members are read over a WebSocket
  usePresence("presence-room", { source: http });
  const name: string | undefined = members[0]?.info.name ?? me?.info.name;
  return [channel, status, error?.message, count, name, text, state, id, reason, texts.length, caughtUp].join();
}

type Message = UIMessage<{ state?: string }>;
const transport = new RedpollChatTransport<Message>({
  source: pusher,
  channel: (id) => `private-chat-${id}`,
  api: "/api/chat",
  headers: { "X-Page": "1" },
  body: () => ({ model: "a" }),
  silenceMs: 10_000,
});
const contract: ChatTransport<Message> = transport;

export function Conversation(): ReactNode {
  const { messages, resumeStream } = useChat<Message>({ id: "1", transport, resume: true });
  const stop: () => void = transport.watch("1", (stream) => void resumeStream({ body: { stream } }));
  stop();
  return messages.map(({ metadata }) => metadata?.state).join();
}

export const app = createElement(RedpollProvider, { source: own }, createElement(Hooks), createElement(Conversation));
transport.ready("1").then(() => transport.close());
export const others = [channel, plain, contract, new RedpollChatTransport({ source: http })];
