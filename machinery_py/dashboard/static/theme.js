// A classic script, run before the first paint: the saved choice of light or dark must not flash.
try {
  document.documentElement.dataset.theme = localStorage.getItem("machinery.theme") || "auto";
} catch {
  // Storage is switched off: the system's choice stays.
}
