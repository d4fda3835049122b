// Applies the theme that the reader chose, before the first paint. Without a choice the system's theme applies.
(() => {
  const chosen = localStorage.getItem("redpoll-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
