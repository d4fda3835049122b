import type { ChatTransport, UIMessage } from "ai";
import type { PusherClient, Source, Wrapped } from "./types.mjs";

export interface RedpollChatTransportOptions {
  /** A client that `redpoll` wrapped, or `streamSource(…)`. */
  source: Source | Wrapped<PusherClient>;
  /** The channel of a chat's answers. It must store them. Default: `chat-` and the chat's id. */
  channel?: (chatId: string) => string;
  /**
   * Where messages are posted, as the AI SDK's own transport does. Default `/api/chat`. The back end answers with
   * `{"stream": ID}` and publishes the answer: by `publish_stream` of redpoll-client, or as chunks of the AI SDK, each
   * an event that is named after the chunk's `type`, with the chunk and `stream` as its data.
   */
  api?: string;
  headers?: HeadersInit | (() => HeadersInit);
  /** More members of the body. */
  body?: object | (() => object);
  credentials?: RequestCredentials;
  fetch?: typeof fetch;
  /** An answer of which nothing comes for so long, in ms, has failed. Default 30,000; time offline doesn't count. */
  silenceMs?: number;
}

/**
 * The transport for `useChat({ transport, resume: true })`. `stop()` ends the reading of this page alone: other pages,
 * and a reload, get the rest. A failed answer keeps its text, with `metadata.state` `failed`, and is an error of the chat;
 * a cancelled one has `metadata.state` `cancelled`.
 */
export declare class RedpollChatTransport<Message extends UIMessage = UIMessage> implements ChatTransport<Message> {
  constructor(options: RedpollChatTransportOptions);
  readonly resumeStreamIsReplay: true;
  sendMessages(options: Parameters<ChatTransport<Message>["sendMessages"]>[0]): ReturnType<ChatTransport<Message>["sendMessages"]>;
  /**
   * The answer under way from its beginning, or else the newest one, if it ended after `ready` and this page hasn't read
   * its end; null if there is none.
   */
  reconnectToStream(options: Parameters<ChatTransport<Message>["reconnectToStream"]>[0]): ReturnType<ChatTransport<Message>["reconnectToStream"]>;
  /** Resolves when everything that is stored of this chat has come. Messages that are loaded then lack no answer. */
  ready(chatId: string): Promise<void>;
  /** Calls `began` with each answer that another page asked for: call `resumeStream()`. Returns how to stop it. */
  watch(chatId: string, began: (stream: string) => void): () => void;
  /** Leaves all channels. */
  close(): void;
}
