// A page made with Echo's hooks for React or Vue, without a browser: what the component sees goes to `say`. The renderers
// draw nothing. Each package has one configuration for a whole page, so one component per framework is mounted at a time.

// What every framework's component does: it follows a public, a private and a presence channel.
function follow(hooks, say) {
  hooks.useEchoPublic("hooks-news", ".headline", (data) => say({ channel: "public", data }));
  hooks.useEcho("hooks-orders", "OrderShipped", (data) => say({ channel: "private", data }));
  const { channel } = hooks.useEchoPresence("hooks-room", ".moved", (data) => say({ channel: "presence", data }));
  return () =>
    channel()
      .here((members) => say({ here: members }))
      .joining((member) => say({ joining: member }))
      .leaving((member) => say({ leaving: member }));
}

async function mountReact(options, say) {
  const [{ createElement, useEffect }, renderer, hooks] = await Promise.all([
    import("react"),
    import("react-test-renderer"),
    import("@laravel/echo-react"),
  ]);
  hooks.configureEcho(options);
  function Component() {
    const status = hooks.useConnectionStatus();
    const socketId = hooks.useSocketId();
    useEffect(() => { say({ status, socket_id: socketId ?? null }); }, [status, socketId]);
    const watchMembers = follow(hooks, say);
    useEffect(() => { watchMembers(); }, []);
    return null;
  }
  const root = renderer.default.create(createElement(Component));
  return () => root.unmount();
}

async function mountVue(options, say) {
  const [{ createRenderer, onMounted, watchEffect }, hooks] = await Promise.all([import("vue"), import("@laravel/echo-vue")]);
  hooks.configureEcho(options);
  const nothing = () => ({});
  const ignored = () => {};
  const { createApp } = createRenderer({
    createElement: nothing, createText: nothing, createComment: nothing, parentNode: () => null, nextSibling: () => null,
    insert: ignored, remove: ignored, setText: ignored, setElementText: ignored, patchProp: ignored,
  });
  const app = createApp({
    setup() {
      const status = hooks.useConnectionStatus();
      const socketId = hooks.useSocketId();
      watchEffect(() => say({ status: status.value, socket_id: socketId.value ?? null }));
      const watchMembers = follow(hooks, say);
      onMounted(watchMembers);
      return () => null;
    },
  });
  app.mount({});
  return () => app.unmount();
}

// Mounts the component; returns how to unmount it.
export const mount = (framework, options, say) => (framework === "react" ? mountReact : mountVue)(options, say);
