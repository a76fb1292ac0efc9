// Reporter for Node's test runner: one result a line, as harness.py prints them.

export default async function* results(events) {
    for await (const { type, data } of events) {
        if (type === "test:pass") {
            yield `${JSON.stringify({ check: data.name, result: "passed" })}\n`;
        } else if (type === "test:fail") {
            const { cause } = data.details.error;
            yield `${cause?.stack ?? ""}\n`;
            const reason = cause instanceof Error ? `${cause.constructor.name}: ${cause.message}` : String(cause);
            yield `${JSON.stringify({ check: data.name, result: "failed", reason })}\n`;
        }
    }
}
