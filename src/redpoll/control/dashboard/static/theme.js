// Light or dark as the reader chose it, before anything is painted. Without a choice the system's is taken.
(() => {
  const chosen = localStorage.getItem("redpoll-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
