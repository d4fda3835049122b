import type { ReactNode } from "react";
import type { GrowingText, PusherClient, Source, TextOptions, TextState, TextsView, Wrapped } from "./types.mjs";

type Client = Wrapped<PusherClient>;

/** Gives the hooks below it their client, or source. */
export declare function RedpollProvider(props: { source: Source | Client | null; children?: ReactNode }): ReactNode;

export interface ChannelView {
  /** pusher-js' channel, to trigger client events; null until it is subscribed to. */
  channel: any;
  status: "subscribing" | "subscribed" | "failed";
  /** Why the subscription was refused. */
  error: Error | null;
}

export type Handlers = Record<string, (data: any, metadata?: { user_id?: string }) => void>;

export interface HookOptions<From> {
  /** Instead of the provider's. */
  source?: From | null;
}

/**
 * Subscribes while the component is mounted, and calls the handlers, by event. They may be written in place: they aren't
 * bound again for each rendering. Components share a channel's subscription. Nothing happens while `name` is null.
 */
export declare function useChannel(
  name: string | null | undefined,
  handlers?: Handlers,
  options?: HookOptions<Client>,
): ChannelView;

export interface Member<Info> {
  id: string;
  info: Info;
}

export interface PresenceView<Info> extends ChannelView {
  members: Member<Info>[];
  /** This page's user. */
  me: Member<Info> | null;
  count: number;
}

/** The members of a presence channel. */
export declare function usePresence<Info = any>(
  name: string | null | undefined,
  options?: HookOptions<Client>,
): PresenceView<Info>;

export interface TextHookOptions extends TextOptions, HookOptions<Source | Client> {
  /** The id of the text to show; default: the one that began last. */
  stream?: string;
}

export interface TextView extends TextsView {
  id: GrowingText["id"] | null;
  text: string;
  /** `loading`: stored parts are still coming. `none`: there is no text. */
  state: TextState | "loading" | "none";
  reason: string | null;
}

/** A text that grows, byte for byte as it was sent, also after a reload; and all others of its channel. */
export declare function useText(name: string | null | undefined, options?: TextHookOptions): TextView;
