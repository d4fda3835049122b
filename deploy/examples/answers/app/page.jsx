"use client";
import { useEffect, useState } from "react";
import { RedpollProvider } from "redpoll-js/react";
import Chat, { Devices } from "./chat.jsx";
import { connect } from "./connect.js";

export default function Page() {
  const [source, setSource] = useState(null);
  useEffect(() => {
    let client = null;
    let isGone = false;
    connect().then((pusher) => {
      if (isGone) return pusher.disconnect();
      client = pusher;
      setSource(pusher);
    });
    return () => {
      isGone = true;
      client?.disconnect();
    };
  }, []);
  return (
    <RedpollProvider source={source}>
      {source && <Chat id="lobby" source={source} />}
      {source && <Devices id="lobby" />}
    </RedpollProvider>
  );
}
