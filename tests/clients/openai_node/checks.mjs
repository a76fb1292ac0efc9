// OpenAI's own client for Node, with its helpers for streams, tools and Zod schemas. Version 6, since version 7 asks for Node 22.

import assert from "node:assert/strict";
import test from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { CONFORMANCE_URL: URL, CONFORMANCE_KEY: KEY, CONFORMANCE_MODEL: MODEL } = process.env;
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0, timeout: 120_000 });
const TURN = [{ role: "user", content: "Name three colours." }];
const RAIN = [{ role: "user", content: "Weather in Rome?" }];
const LONG = { model: MODEL, prompt: "Once upon a time", max_tokens: 2000, ignore_eos: true };
const SCHEMA = {
    type: "object",
    properties: { city: { type: "string", maxLength: 12 } },
    required: ["city"],
    additionalProperties: false,
};
const TOOL = { type: "function", function: { name: "weather", strict: true, parameters: SCHEMA } };
const NAMED = { type: "function", function: { name: "weather" } };

async function collect(stream) {
    const chunks = [];
    for await (const chunk of stream) {
        chunks.push(chunk);
    }
    return chunks;
}

async function aborts() {
    const response = await fetch(`${URL}/metrics`, { headers: { Authorization: `Bearer ${KEY}` } });
    const [, count] = /requests_finished_total\{reason="abort"\} (\S+)/.exec(await response.text());
    return Number(count);
}

// The server notices a client that is gone a little later; a request that ran to its end would never be counted.
async function abortsReach(count) {
    for (let attempt = 0; attempt < 600 && (await aborts()) < count; attempt += 1) {
        await sleep(100);
    }
    assert.equal(await aborts(), count);
}

test("models", async () => {
    assert.deepEqual((await collect(client.models.list())).map((model) => model.id), [MODEL]);
    const model = await client.models.retrieve(MODEL);
    assert.equal(model.object, "model");
    assert.ok(Number.isInteger(model.created));
    assert.equal(typeof model.owned_by, "string");
});

test("completion", async () => {
    const answer = await client.completions.create({ model: MODEL, prompt: "Once upon a time", max_tokens: 6, temperature: 0 });
    assert.equal(answer.object, "text_completion");
    assert.ok(answer.choices[0].text);
    assert.ok(answer.usage.completion_tokens > 0 && answer.usage.completion_tokens <= 6);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("completion stream equals whole, with usage last", async () => {
    const request = { model: MODEL, prompt: "Once upon a time", max_tokens: 8, temperature: 0 };
    const whole = await client.completions.create(request);
    const chunks = await collect(await client.completions.create({ ...request, stream: true, stream_options: { include_usage: true } }));
    const last = chunks.pop();
    assert.deepEqual(last.choices, []);
    assert.deepEqual(last.usage, whole.usage);
    assert.ok(chunks.every((chunk) => chunk.usage === null));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
    assert.equal(chunks.at(-1).choices[0].finish_reason, whole.choices[0].finish_reason);
});

test("completion echo with log-probabilities", async () => {
    const answer = await client.completions.create({ model: MODEL, prompt: "Paris is in France", max_tokens: 1, echo: true, logprobs: 2 });
    const { text, logprobs } = answer.choices[0];
    assert.equal(logprobs.tokens.join(""), text);
    assert.equal(logprobs.token_logprobs[0], null);
    assert.ok(logprobs.token_logprobs.slice(1).every(Number.isFinite));
    assert.ok(logprobs.top_logprobs.slice(1).every((top) => Object.keys(top).length >= 2));
});

test("several prompts and choices", async () => {
    const answer = await client.completions.create({ model: MODEL, prompt: ["One", "Two"], n: 2, max_tokens: 3, seed: 1 });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
});

test("null fields are defaults", async () => {
    const answer = await client.completions.create({ model: MODEL, prompt: "x", n: null, stop: null, logprobs: null, max_tokens: 2 });
    assert.equal(answer.choices.length, 1);
    assert.equal(answer.choices[0].logprobs, null);
});

test("chat", async () => {
    const answer = await client.chat.completions.create({ model: MODEL, messages: TURN, max_completion_tokens: 8 });
    const [{ message, finish_reason: reason }] = answer.choices;
    assert.equal(answer.object, "chat.completion");
    assert.equal(message.role, "assistant");
    assert.ok(message.content);
    assert.equal(message.refusal, null);
    assert.ok(["stop", "length"].includes(reason));
});

test("chat stream with usage last", async () => {
    const stream = await client.chat.completions.create({
        model: MODEL, messages: TURN, max_completion_tokens: 8, stream: true, stream_options: { include_usage: true },
    });
    const chunks = await collect(stream);
    const last = chunks.pop();
    assert.equal(chunks[0].choices[0].delta.role, "assistant");
    assert.ok(chunks.every((chunk) => chunk.object === "chat.completion.chunk" && chunk.id === last.id && chunk.usage === null));
    assert.deepEqual(last.choices, []);
    assert.ok(last.usage.completion_tokens > 0);
});

test("chat stream helper", async () => {
    const stream = client.chat.completions.stream({ model: MODEL, messages: TURN, stop: "e", temperature: 0 });
    let text = "";
    stream.on("content", (delta) => { text += delta; });
    const answer = await stream.finalChatCompletion();
    assert.equal(answer.choices[0].message.content, text);
    assert.equal(answer.choices[0].finish_reason, "stop");
});

test("chat with stop and seed", async () => {
    const request = { model: MODEL, messages: TURN, max_completion_tokens: 12, seed: 3, temperature: 1 };
    const texts = await Promise.all([1, 2].map(async () => (await client.chat.completions.create(request)).choices[0].message.content));
    assert.equal(texts[0], texts[1]);
    const stop = texts[0].slice(2, 5);
    const [choice] = (await client.chat.completions.create({ ...request, stop })).choices;
    assert.equal(choice.message.content, texts[0].slice(0, texts[0].indexOf(stop)));
    assert.equal(choice.finish_reason, "stop");
});

test("several choices, whole and in a stream", async () => {
    const request = { model: MODEL, messages: TURN, max_completion_tokens: 8, seed: 5, temperature: 1, n: 3 };
    const whole = await client.chat.completions.create(request);
    assert.deepEqual(whole.choices.map((choice) => choice.index), [0, 1, 2]);
    const texts = ["", "", ""];
    for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
        for (const choice of chunk.choices) {
            texts[choice.index] += choice.delta.content ?? "";
        }
    }
    assert.deepEqual(texts, whole.choices.map((choice) => choice.message.content));
});

test("chat log-probabilities, whole and in a stream", async () => {
    const request = { model: MODEL, messages: TURN, max_completion_tokens: 4, temperature: 0, logprobs: true, top_logprobs: 3 };
    const whole = (await client.chat.completions.create(request)).choices[0].logprobs.content;
    assert.ok(whole.length > 0);
    for (const entry of whole) {
        assert.equal(entry.top_logprobs.length, 3);
        assert.equal(entry.top_logprobs[0].token, entry.token);
        assert.ok(entry.logprob <= 0);
        assert.ok(Array.isArray(entry.bytes));
    }
    const chunks = await collect(await client.chat.completions.create({ ...request, stream: true }));
    const streamed = chunks.flatMap((chunk) => chunk.choices[0].logprobs?.content ?? []);
    assert.deepEqual(streamed.map((entry) => entry.token), whole.map((entry) => entry.token));
});

test("JSON schema from Zod", async () => {
    const answer = await client.chat.completions.parse({
        model: MODEL,
        messages: [{ role: "user", content: "Is water wet?" }],
        response_format: zodResponseFormat(z.object({ yes: z.boolean() }), "answer"),
        temperature: 0,
    });
    assert.equal(typeof answer.choices[0].message.parsed.yes, "boolean");
});

test("JSON schema in a stream", async () => {
    const stream = await client.chat.completions.create({
        model: MODEL,
        messages: RAIN,
        response_format: { type: "json_schema", json_schema: { name: "place", strict: true, schema: SCHEMA } },
        temperature: 0,
        stream: true,
    });
    const text = (await collect(stream)).map((chunk) => chunk.choices[0].delta.content ?? "").join("");
    assert.deepEqual(Object.keys(JSON.parse(text)), ["city"]);
});

test("required tool call, and its result sent back", async () => {
    const request = { model: MODEL, messages: RAIN, tools: [TOOL], temperature: 0 };
    const first = await client.chat.completions.create({ ...request, tool_choice: "required", parallel_tool_calls: false });
    const [{ message, finish_reason: reason }] = first.choices;
    assert.equal(reason, "tool_calls");
    assert.equal(message.tool_calls.length, 1);
    const [call] = message.tool_calls;
    assert.equal(call.type, "function");
    assert.equal(call.function.name, "weather");
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
    const messages = [...RAIN, message, { role: "tool", tool_call_id: call.id, content: "sunny" }];
    const second = await client.chat.completions.create({ ...request, messages, tool_choice: "none", max_completion_tokens: 8 });
    assert.ok(second.choices[0].message.content);
    assert.equal(second.choices[0].message.tool_calls ?? null, null);
});

test("named tool call in a stream", async () => {
    const request = { model: MODEL, messages: RAIN, tools: [TOOL], tool_choice: NAMED, temperature: 0 };
    const chunks = await collect(await client.chat.completions.create({ ...request, stream: true }));
    const parts = chunks.flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? []);
    assert.ok(parts.every((part) => part.index === 0));
    assert.ok(parts[0].id);
    assert.equal(parts[0].function.name, "weather");
    const text = parts.map((part) => part.function.arguments ?? "").join("");
    assert.deepEqual(Object.keys(JSON.parse(text)), ["city"]);
});

test("tool runner calls the function, its arguments checked by Zod", async () => {
    const cities = [];
    const weather = (place) => {
        cities.push(place.city);
        return "sunny";
    };
    const tools = [zodFunction({ name: "weather", parameters: z.object({ city: z.string().max(12) }), function: weather })];
    const runner = client.chat.completions.runTools({ model: MODEL, messages: RAIN, tools, tool_choice: NAMED, temperature: 0 });
    await runner.done();
    assert.deepEqual(cities.map((city) => typeof city), ["string"]);
    assert.equal(runner.messages.at(-1).content, "sunny");
});

test("errors have their classes", async () => {
    const cases = [
        [OpenAI.AuthenticationError, 401, () => client.withOptions({ apiKey: "wrong" }).models.list()],
        [OpenAI.BadRequestError, 400, () => client.completions.create({ model: MODEL, prompt: "x", max_tokens: 10 ** 6 })],
        [OpenAI.BadRequestError, 400, () => client.chat.completions.create({ model: MODEL, messages: [] })],
        [OpenAI.BadRequestError, 400, () => client.chat.completions.create({ model: MODEL, messages: TURN, n: 0, stream: true })],
        [OpenAI.NotFoundError, 404, () => client.completions.create({ model: "none", prompt: "x" })],
        [OpenAI.NotFoundError, 404, () => client.models.retrieve("none")],
        [OpenAI.NotFoundError, 404, () => client.embeddings.create({ model: MODEL, input: "x" })],
    ];
    for (const [expected, status, call] of cases) {
        await assert.rejects(call, (error) => {
            assert.ok(error instanceof expected, `${error}`);
            assert.equal(error.status, status);
            assert.ok(error.error.message);
            assert.equal(typeof error.type, "string");
            assert.ok(error.code === null || typeof error.code === "string");
            assert.ok(error.param === null || typeof error.param === "string");
            assert.ok(error.requestID);
            return true;
        });
    }
});

test("request ids come back", async () => {
    const request = { model: MODEL, prompt: "x", max_tokens: 1 };
    const sent = client.completions.create(request, { headers: { "X-Request-Id": "mine" } });
    const { data, response, request_id: id } = await sent.withResponse();
    assert.equal(id, "mine");
    assert.equal(response.headers.get("x-request-id"), "mine");
    assert.equal(data._request_id, "mine");
    assert.ok(data.id.startsWith("cmpl-mine"));
});

test("many at once", async () => {
    const request = { model: MODEL, messages: TURN, max_completion_tokens: 4 };
    const answers = await Promise.all(Array.from({ length: 8 }, () => client.chat.completions.create(request)));
    assert.equal(new Set(answers.map((answer) => answer.id)).size, 8);
});

test("a stream aborted by its signal ends on the server too", async () => {
    const before = await aborts();
    const controller = new AbortController();
    let chunks = 0;
    for await (const _ of await client.completions.create({ ...LONG, stream: true }, { signal: controller.signal })) {
        chunks += 1;
        controller.abort();
    }
    assert.equal(chunks, 1);
    await abortsReach(before + 1);
});

test("a stream that is left ends on the server too", async () => {
    const before = await aborts();
    for await (const _ of await client.completions.create({ ...LONG, stream: true })) {
        break;
    }
    await abortsReach(before + 1);
});

test("a whole answer aborted by its signal ends on the server too", async () => {
    const before = await aborts();
    await assert.rejects(client.completions.create(LONG, { signal: AbortSignal.timeout(1000) }), OpenAI.APIUserAbortError);
    await abortsReach(before + 1);
});

test("a timeout has its class and ends the request on the server", async () => {
    const before = await aborts();
    await assert.rejects(client.completions.create(LONG, { timeout: 1000 }), OpenAI.APIConnectionTimeoutError);
    await abortsReach(before + 1);
});
