"use client";
// Hooks for React 18 and 19: channels, their members, and texts that grow. react.d.mts documents them.
import { createContext, createElement, useContext, useEffect, useMemo, useRef, useState } from "react";
import { followTexts } from "./follow.mjs";
import { hold, isRefused, refusal, release, streamSource } from "./sources.mjs";

const Source = createContext(null);

export function RedpollProvider({ source, children }) {
  return createElement(Source.Provider, { value: source }, children);
}

const SUBSCRIBING = { channel: null, status: "subscribing", error: null };

// Pages write a stream source in place, so it is a new object each time. Here it stays the same for the same server, app and
// token. Its functions are those of the latest rendering.
function useSource(source) {
  const provided = useContext(Source);
  const chosen = source === undefined ? provided : source;
  const given = chosen?.stream;
  const latest = useRef(given);
  useEffect(() => {
    latest.current = given;
  });
  const server = given && String(given.server);
  const token = typeof given?.token === "function" ? undefined : given?.token;
  const lasting = useMemo(() => {
    const signed = (name) => token ?? latest.current.token?.(name);
    const ask = (...request) => (latest.current.fetch || fetch)(...request);
    return server === undefined ? null : streamSource({ server, app: given.app, token: signed, fetch: ask });
  }, [server, given?.app, token]);
  return lasting || chosen;
}

// Subscribes while the component is there. `changed(channel)` is called when it is subscribed and when it is left.
function useSubscription(pusher, name, changed) {
  const [shown, setShown] = useState({ view: SUBSCRIBING });
  useEffect(() => {
    if (!pusher || !name) return undefined;
    if (typeof pusher.follow === "function") throw new TypeError("this hook needs a pusher-js client");
    const channel = hold(pusher, name);
    const show = (view) => setShown({ pusher, name, view });
    const succeeded = () => show({ channel, status: "subscribed", error: null });
    const refused = (data) => show({ channel, status: "failed", error: refusal(data) });
    show({ ...SUBSCRIBING, channel });
    channel.bind("pusher:subscription_succeeded", succeeded);
    channel.bind("pusher:subscription_error", refused);
    const unbind = changed(channel);
    if (channel.subscribed) succeeded();
    else if (isRefused(pusher, channel)) refused();
    return () => {
      channel.unbind("pusher:subscription_succeeded", succeeded);
      channel.unbind("pusher:subscription_error", refused);
      unbind();
      release(pusher, name);
      setShown({ view: SUBSCRIBING });
    };
  }, [pusher, name, changed]);
  // A rendering with another channel comes before the effect that changes to it.
  return shown.pusher === pusher && shown.name === name ? shown.view : SUBSCRIBING;
}

export function useChannel(name, handlers = {}, { source } = {}) {
  const latest = useRef(handlers);
  useEffect(() => {
    latest.current = handlers;
  });
  const events = Object.keys(handlers).sort().join("\n");
  const bind = useMemo(() => {
    const bound = (events ? events.split("\n") : []).map((event) => [
      event,
      (data, metadata) => latest.current[event]?.(data, metadata),
    ]);
    return (channel) => {
      for (const [event, heard] of bound) channel.bind(event, heard);
      return () => {
        for (const [event, heard] of bound) channel.unbind(event, heard);
      };
    };
  }, [events]);
  return useSubscription(useSource(source), name, bind);
}

const NOBODY = { channel: null, members: [], me: null };
const MEMBERS_CHANGE = ["pusher:subscription_succeeded", "pusher:member_added", "pusher:member_removed"];

export function usePresence(name, { source } = {}) {
  const [present, setPresent] = useState(NOBODY);
  const watch = useMemo(
    () => (channel) => {
      const read = () => {
        const members = [];
        channel.members.each(({ id, info }) => members.push({ id, info }));
        setPresent({ channel, members, me: channel.members.me });
      };
      for (const event of MEMBERS_CHANGE) channel.bind(event, read);
      if (channel.subscribed) read();
      return () => {
        for (const event of MEMBERS_CHANGE) channel.unbind(event, read);
        setPresent(NOBODY);
      };
    },
    [],
  );
  const view = useSubscription(useSource(source), name, watch);
  const { members, me } = present.channel === view.channel ? present : NOBODY;
  return { ...view, members, me, count: members.length };
}

const NOTHING = { texts: [], caughtUp: false, connected: false, error: null };

export function useText(name, { source: chosen, stream, ...options } = {}) {
  const source = useSource(chosen);
  const [shown, setShown] = useState({ view: NOTHING });
  // Pages write the options in place, so they are new objects each time, with the same content.
  const written = JSON.stringify(options);
  useEffect(() => {
    if (!source || !name) return undefined;
    const show = (view) => setShown({ source, name, written, view });
    const following = followTexts(source, name, JSON.parse(written), show);
    return () => {
      following.close();
      setShown({ view: NOTHING });
    };
  }, [source, name, written]);
  // A rendering with other arguments comes before the effect that changes to them.
  const isTheirs = shown.source === source && shown.name === name && shown.written === written;
  const view = isTheirs ? shown.view : NOTHING;
  const { texts, caughtUp, error } = view;
  const text = stream === undefined ? texts[texts.length - 1] : texts.find(({ id }) => id === String(stream));
  if (text) return { ...view, ...text, reason: text.reason || null };
  const state = error ? "failed" : caughtUp ? "none" : "loading";
  return { ...view, id: null, text: "", state, reason: error ? error.message : null };
}
