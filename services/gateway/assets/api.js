// Reading the API and asking a run for something. The browser sends the ETag of what it has by itself.

const TIMEOUT_MS = 10000;
const CONTROL_TIMEOUT_MS = 120000; // the server may have to connect to the run first
const ROUNDS = 12; // pages of rows in one go; the rest comes with the next

/** Whatever the network or the server did wrong, with the HTTP status (0: there was no answer). */
export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function request(path, milliseconds, options) {
  try {
    const response = await fetch(`/api/v1${path}`, { ...options, signal: AbortSignal.timeout(milliseconds) });
    const body = await response.json();
    if (response.ok) return body;
    const told = body.detail ?? response.statusText;
    throw new RequestError(typeof told === "string" ? told : told.map((t) => t.msg).join("; "), response.status);
  } catch (error) {
    if (error instanceof RequestError) throw error;
    throw new RequestError(error.name === "TimeoutError" ? "The server did not answer in time." : "The server does not answer.", 0);
  }
}

export function get(path) {
  return request(path, TIMEOUT_MS, { cache: "no-cache" });
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

/** What the run answered. */
export async function ask(run, action, token, body) {
  const headers = { authorization: `Bearer ${token}`, ...(body ? { "content-type": "application/json" } : {}) };
  const options = { method: "POST", headers, body: body ? JSON.stringify(body) : undefined };
  return (await request(`/runs/${encodeURIComponent(run)}/control/${action}`, CONTROL_TIMEOUT_MS, options)).message;
}
