// Before the first paint: the theme that the reader chose, if any; otherwise the system's.
try {
  const chosen = localStorage.getItem("ludus-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch { /* storage may be switched off */ }
