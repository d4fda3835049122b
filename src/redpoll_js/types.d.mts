/** What `redpoll` needs of a pusher-js client. */
export interface PusherClient {
  subscribe(channel: string): any;
  unsubscribe(channel: string): any;
  channel(name: string): any;
  connection: any;
}

/** A place in a channel's history. */
export interface Position {
  epoch: string;
  offset: number;
}

export interface HistoryMessage {
  offset: number;
  event: string;
  /** The text as it was published. */
  data: string;
  /** Unix time in ms. */
  time_ms: number;
}

export interface HistoryPage {
  epoch: string;
  /** Oldest first. */
  messages: HistoryMessage[];
  /** The `since` or `before` of the page that follows; null on the last page. */
  next: string | null;
}

export interface HistoryOptions {
  /** 1 to 1,000; default 100. */
  limit?: number;
  before?: string | Position;
  since?: string | Position;
}

/** Which earlier messages a first subscribe replays. */
export type Wanted =
  | { rewind: { count: number } | { seconds: number }; since?: undefined }
  | { since: Position; rewind?: undefined };

/** The data of the event `pusher:position`. */
export interface PositionEvent extends Position {
  /** False: messages are missing before this position. Only after a subscribe with `since`, so after each reconnect. */
  recovered?: boolean;
}

/** What `redpoll(pusher)` adds to the client. */
export interface Redpoll<Channel = any> {
  readonly redpoll: true;
  subscribe(channel: string, wanted?: Wanted): Channel;
  /** Rejects if the server refuses, doesn't answer within 10 s, or the connection is lost. */
  history(channel: string, options?: HistoryOptions): Promise<HistoryPage>;
  /** Of the latest message; null if the channel stores none. */
  position(channel: string): Position | null;
}

export type Wrapped<Pusher extends PusherClient> = Pusher & Redpoll<ReturnType<Pusher["subscribe"]>>;

export interface AuthorizerOptions {
  /** Gets a form with `socket_id` and `channel_name[]`. */
  endpoint: string;
  headers?: Record<string, string> | (() => Record<string, string>);
  params?: Record<string, string> | (() => Record<string, string>);
}

/** A `customHandler` of pusher-js' `channelAuthorization`. */
export type Authorizer = (
  params: { socketId: string; channelName: string },
  callback: (error: Error | null, data: any) => void,
) => void;

/** Where messages of channels come from. */
export interface Source {
  /** Returns a function that ends it. */
  follow(channel: string, listener: Listener): () => void;
}

export interface Listener {
  /** Each message once, in order. `joined`: the server may have joined parts, and none is missing. */
  message(event: string, data: unknown, joined: boolean): void;
  /** Everything that was stored has come. */
  caughtUp(): void;
  connection(connected: boolean): void;
  /** Messages before this point are missing. */
  gap(): void;
  /** The stored messages follow once more, from the first. */
  restart(): void;
  /** Nothing more will come. */
  failed(error: Error): void;
}

export interface StreamOptions {
  /** The server's URL, such as `https://realtime.example.com`. */
  server: string;
  /** The app's id. */
  app: string;
  /** A token of scope read, or a function that returns one for a channel; it is called before each request. */
  token?: string | ((channel: string) => string | Promise<string>);
  fetch?: typeof fetch;
}

/** `incomplete`: a part of the text is missing. `failed` and `cancelled` texts may lack parts as well. */
export type TextState = "streaming" | "done" | "failed" | "cancelled" | "incomplete";

export interface GrowingText {
  id: string;
  text: string;
  state: TextState;
  /** Why the page gave it up. */
  reason?: string;
}

/** Where parts have what; each a name, or a path with dots. */
export interface Fields {
  /** Which text a part is of. Default `stream`. */
  id?: string;
  /** The part's text. Default `delta`. */
  delta?: string;
  /** The part's number, from 0. Default `n`. */
  number?: string;
  /** The length of the text with this part, in UTF-16 units. Default `length`. */
  length?: string;
  /** `done`, `failed` or `cancelled`, at the end. Default `state`. */
  state?: string;
}

export interface TextOptions {
  /** The names of the events that carry parts. Default: all events with the fields, except client events. */
  event?: string | string[];
  fields?: Fields;
  /** Events that end a text, by name: `{ stream_end: "done" }`. Their data must have its id. */
  ends?: Record<string, "done" | "failed" | "cancelled">;
  /** A text of which nothing comes for so long, in ms, is `failed`. Default 30,000; time offline doesn't count. */
  silenceMs?: number;
}

export interface TextsView {
  /** In the order in which they began. */
  texts: GrowingText[];
  /** Whether everything that was stored has come. */
  caughtUp: boolean;
  connected: boolean;
  /** Why nothing more will come: the subscription was refused. */
  error: Error | null;
}

export interface FollowedTexts {
  view(): TextsView;
  close(): void;
}

export interface RedpollFunction {
  /** Wraps a pusher-js client, before its first subscribe, and returns it. */
  <Pusher extends PusherClient>(pusher: Pusher): Wrapped<Pusher>;
  /** Asks an endpoint for the signatures of all channels of 15 ms at once. */
  authorizer(options: AuthorizerOptions): Authorizer;
  /** Joins texts that come in parts. `changed` is called after each change. */
  followTexts(
    source: Source | Wrapped<PusherClient>,
    channel: string,
    options?: TextOptions,
    changed?: (view: TextsView) => void,
  ): FollowedTexts;
  /** Reads channels with history over HTTP, instead of by a WebSocket. */
  streamSource(options: StreamOptions): Source;
}
