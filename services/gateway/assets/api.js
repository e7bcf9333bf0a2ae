// Reading the API and asking a run for something. The browser sends the ETag of what it has by itself.

const TIMEOUT_MS = 10000;
const CONTROL_TIMEOUT_MS = 70000; // the server may have to connect to the run first
const ROUNDS = 12; // pages of rows in one go; the rest comes with the next

export async function get(path) {
  const response = await fetch(`/api/v1${path}`, { cache: "no-cache", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw await problem(response);
  return response.json();
}

/** Rows from the cursor on, until there are no more: {items, next, ...} of the last answer, with all items. */
export async function rowsSince(run, name, since) {
  const items = [];
  for (let round = 0; ; round++) {
    const answer = await get(`/runs/${encodeURIComponent(run)}/${name}?since=${since}`);
    items.push(...answer.items);
    if (answer.next === since || round === ROUNDS || !answer.items.length) return { ...answer, items };
    since = answer.next;
  }
}

export async function ask(run, action, token, body) {
  const response = await fetch(`/api/v1/runs/${encodeURIComponent(run)}/control/${action}`, {
    method: "POST",
    headers: { authorization: `Bearer ${token}`, ...(body ? { "content-type": "application/json" } : {}) },
    body: body ? JSON.stringify(body) : undefined,
    signal: AbortSignal.timeout(CONTROL_TIMEOUT_MS),
  });
  if (!response.ok) throw await problem(response);
  return (await response.json()).message;
}

async function problem(response) {
  let detail = response.statusText;
  if (response.headers.get("content-type")?.includes("json")) {
    const told = (await response.json()).detail;
    detail = typeof told === "string" ? told : told.map((t) => t.msg).join("; ");
  }
  return Object.assign(new Error(detail), { status: response.status });
}
