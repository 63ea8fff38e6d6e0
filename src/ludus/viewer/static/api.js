// Requests to the server of this page, and the address as the page's state.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function answered(response) {
  let body = null;
  try { body = await response.json(); } catch { /* an error page has no JSON */ }
  if (!response.ok) throw new ApiError(body?.error || `the server answered ${response.status}`, response.status);
  return body;
}

export async function get(path, query) {
  const words = query ? `?${new URLSearchParams(pairs(query))}` : "";
  let response;
  try { response = await fetch(path + words, { headers: { Accept: "application/json" } }); }
  catch { throw new ApiError("The viewer does not answer. Is `ludus view` still running?", 0); }
  return answered(response);
}

export async function post(path, body) {
  const headers = { "Content-Type": "application/json", "X-Ludus": "1" };
  return answered(await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

export function pairs(query) {
  return Object.entries(query).flatMap(([name, value]) =>
    (Array.isArray(value) ? value : [value]).filter((one) => one !== null && one !== undefined && one !== "").map((one) => [name, one]));
}

export const place = (one) => `${encodeURIComponent(one.run)}/${encodeURIComponent(one.file)}/${one.row}`;
export const episodeUrl = (one, query) => address(`/episode/${place(one)}`, query || {});

export function address(path, query) {
  const words = new URLSearchParams(pairs(query || {})).toString();
  return words ? `${path}?${words}` : path;
}

export function parameters(search = location.search) {
  const found = {};
  for (const [name, value] of new URLSearchParams(search)) {
    if (name in found) found[name] = [found[name], value].flat();
    else found[name] = value;
  }
  return found;
}

// Change the address without leaving the page, so that it can be shared as it is.
export function remember(changes, push = false) {
  const query = { ...parameters(), ...changes };
  history[push ? "pushState" : "replaceState"](null, "", address(location.pathname, query));
}

export const many = (value) => (value === undefined ? [] : [value].flat());
