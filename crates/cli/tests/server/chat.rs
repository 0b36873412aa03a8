//! `/v1/chat/completions`: whole answers and streams are the same, and have the shapes that clients read.

use std::io::Read;

use serde_json::{Value, json};

use crate::client::{MODEL, Server};

const PATH: &str = "/v1/chat/completions";

fn request(more: Value) -> Value {
    let mut body =
        json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 12, "seed": 7 });
    let Value::Object(more) = more else { panic!("expected an object") };
    body.as_object_mut().unwrap().extend(more);
    body
}

/// Text, finish reason and log-probabilities of each choice of a stream.
fn joined(chunks: &[Value]) -> Vec<(String, Value, Vec<Value>)> {
    let mut choices: Vec<(String, Value, Vec<Value>)> = Vec::new();
    for chunk in chunks {
        for choice in chunk["choices"].as_array().unwrap() {
            let at = choice["index"].as_u64().unwrap() as usize;
            while choices.len() <= at {
                choices.push((String::new(), Value::Null, Vec::new()));
            }
            choices[at].0.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
            assert!(choice.get("finish_reason").is_some(), "{chunk}");
            if !choice["finish_reason"].is_null() {
                assert_eq!(choices[at].1, Value::Null, "two ends");
                choices[at].1 = choice["finish_reason"].clone();
            }
            choices[at].2.extend(choice["logprobs"]["content"].as_array().cloned().unwrap_or_default());
        }
    }
    choices
}

#[test]
fn streams_and_whole_answers_are_the_same() {
    let server = Server::start(&[]);
    for more in [
        json!({}),
        json!({ "temperature": 0 }),
        json!({ "n": 3, "temperature": 1.5 }),
        json!({ "logprobs": true, "top_logprobs": 3 }),
        json!({ "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5,
                "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 4, "logit_bias": { "5": 2.5 } }),
    ] {
        let whole = server.ok(PATH, &request(more.clone()));
        let mut streamed = request(more.clone());
        streamed["stream"] = true.into();
        streamed["stream_options"] = json!({ "include_usage": true });
        let reply = server.post(PATH, &streamed);
        assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let chunks = reply.chunks();
        let choices = whole["choices"].as_array().unwrap();
        for (choice, (text, finish, logprobs)) in choices.iter().zip(joined(&chunks)) {
            assert_eq!(choice["message"]["content"], text, "{more}");
            assert_eq!(choice["finish_reason"], finish);
            assert_eq!(choice["logprobs"]["content"].as_array().cloned().unwrap_or_default(), logprobs);
        }
        let (last, before) = chunks.split_last().unwrap();
        assert_eq!(
            (&last["choices"], &last["usage"]["completion_tokens"]),
            (&json!([]), &whole["usage"]["completion_tokens"])
        );
        assert!(before.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some()));
        assert!(chunks.iter().all(|chunk| chunk["id"] == last["id"] && chunk["created"] == last["created"]));
        assert_eq!(before[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    }
}

#[test]
fn the_same_request_gives_the_same_answer_alone_and_among_others() {
    let server = Server::start(&[]);
    let body = request(json!({ "logprobs": true, "top_logprobs": 2, "temperature": 1 }));
    let alone = server.ok(PATH, &body)["choices"].clone();
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..8)
            .map(|i| {
                let (server, body) = (&server, &body);
                scope.spawn(move || {
                    let other =
                        request(json!({ "messages": [{ "role": "user", "content": "x".repeat(i * 7) }], "seed": i }));
                    if i % 2 == 0 {
                        server.ok(PATH, body)["choices"].clone()
                    } else {
                        server.ok(PATH, &other)["choices"].clone()
                    }
                })
            })
            .collect();
        for (i, thread) in all.into_iter().enumerate() {
            let found = thread.join().unwrap();
            assert!(i % 2 == 1 || found == alone, "{found}");
        }
    });
}

#[test]
fn shapes_of_a_whole_answer() {
    let server = Server::start(&[]);
    let answer = server.ok(PATH, &request(json!({ "logprobs": true, "top_logprobs": 2, "return_token_ids": true })));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("chat.completion"), &json!(MODEL)));
    let usage = &answer["usage"];
    let sum = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], sum);
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    let ids = choice["token_ids"].as_array().unwrap();
    assert_eq!(usage["completion_tokens"], ids.len());
    for entry in choice["logprobs"]["content"].as_array().unwrap() {
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0 && entry["bytes"].is_array());
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
    }
    let stopped = server.ok(PATH, &request(json!({ "temperature": 0, "max_tokens": 40 })));
    let text = stopped["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(3).take(2).collect();
    let cut = server.ok(PATH, &request(json!({ "temperature": 0, "max_tokens": 40, "stop": [stop] })));
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
    assert_eq!(cut["choices"][0]["stop_reason"], stop);
    assert!(!cut["choices"][0]["message"]["content"].as_str().unwrap().contains(&stop));
}

#[test]
fn what_can_not_be_done_is_refused_by_name() {
    let server = Server::start(&[]);
    for (more, param, status) in [
        (json!({ "model": "other" }), "model", 404),
        (json!({ "model": "../../etc/passwd" }), "model", 404),
        (json!({ "messages": [] }), "messages", 400),
        (json!({ "messages": [{ "role": "robot", "content": "a" }] }), "messages[0].role", 400),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "http://10.0.0.1/" } }] }] }),
            "messages[0].content[0]",
            400,
        ),
        (json!({ "temperature": -1 }), "temperature", 400),
        (json!({ "temperature": "hot" }), "temperature", 400),
        (json!({ "top_p": 0 }), "top_p", 400),
        (json!({ "n": 0 }), "n", 400),
        (json!({ "top_logprobs": 2 }), "top_logprobs", 400),
        (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs", 400),
        (json!({ "prompt_logprobs": -1 }), "prompt_logprobs", 400),
        (json!({ "stream_options": { "include_usage": true } }), "stream_options", 400),
        (json!({ "max_tokens": 100_000 }), "max_tokens", 400),
        (json!({ "max_tokens": 0 }), "max_tokens", 400),
        (json!({ "logit_bias": { "320": 1 } }), "logit_bias", 400),
        (json!({ "logit_bias": { "x": 1 } }), "logit_bias", 400),
        (json!({ "logit_bias": { "1": 101 } }), "logit_bias", 400),
        (json!({ "functions": [{ "name": "f" }] }), "functions", 400),
        (json!({ "chat_template": "{{ 1 }}" }), "chat_template", 400),
        (json!({ "chat_template_kwargs": { "messages": [] } }), "chat_template_kwargs", 400),
        (json!({ "best_of": 2 }), "best_of", 400),
        (json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] }), "tools", 400),
        (json!({ "tool_choice": "required" }), "tool_choice", 400),
        (json!({ "reasoning_effort": "much" }), "reasoning_effort", 400),
        (json!({ "priority": -5 }), "priority", 400),
        (json!({ "response_format": { "type": "xml" } }), "response_format", 400),
        (json!({ "response_format": { "type": "json_object", "strictly": true } }), "response_format.strictly", 400),
        (json!({ "messages": [{ "role": "user", "content": "a", "reasoning": 1 }] }), "messages[0].reasoning", 400),
        (json!({ "modalities": ["text", "audio"] }), "modalities", 400),
        (json!({ "verbosity": "low" }), "verbosity", 400),
        (json!({ "max_tokens": -1 }), "max_tokens", 400),
        (json!({ "guided_regex": "(" }), "guided_regex", 400),
        (json!({ "grammar": "root ::= \"(\" root \")\"" }), "grammar", 400),
        (json!({ "structured_outputs": { "grammar": "start: other" } }), "structured_outputs", 400),
        (json!({ "tools": [{ "type": "function", "function": { "name": "f" }, "cost": 1 }] }), "tools[0].cost", 400),
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "f", "schema": {} } }] }),
            "tools[0].function.schema",
            400,
        ),
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "f" } }],
                    "tool_choice": { "type": "function", "function": { "name": "f", "times": 2 } } }),
            "tool_choice.function.times",
            400,
        ),
        (json!({ "thinking": { "type": "disabled", "depth": 1 } }), "thinking.depth", 400),
        (json!({ "stop": [null] }), "stop", 400),
        (json!({ "stream": true, "stream_options": { "include_all": true } }), "stream_options.include_all", 400),
    ] {
        let (found, _, name, message) = server.refused(PATH, &request(more.clone()));
        assert_eq!((found, name.as_str()), (status, param), "{more}: {message}");
        let is_plain = ["enum", "u64", "u32", "f32"].iter().all(|word| !message.contains(word));
        assert!(!message.is_empty() && is_plain, "{message}");
    }
    // An answer sent back as clients got it is fine.
    let answer = json!({ "role": "assistant", "content": "b", "refusal": null, "annotations": [], "audio": null,
                         "function_call": null, "tool_calls": null });
    let messages = json!([{ "role": "user", "content": "a" }, answer, { "role": "user", "content": "c" }]);
    server.ok(PATH, &request(json!({ "messages": messages })));
    let reply = server.post(PATH, &request(json!({ "frobnicate": 1, "user": "me" })));
    assert_eq!((reply.status, reply.header("x-ignored-parameters")), (200, Some("frobnicate")));
    // Whatever else is in what comes back is told.
    let part = json!({ "type": "text", "text": "a", "index": 0 });
    let messages = json!([{ "role": "user", "content": [part], "mood": "bad" }]);
    let body = request(json!({ "messages": messages, "modalities": ["text"], "verbosity": "medium" }));
    let reply = server.post(PATH, &body);
    let ignored = Some("messages[0].mood, messages[0].content[0].index");
    assert_eq!((reply.status, reply.header("x-ignored-parameters")), (200, ignored), "{}", reply.body);
}

#[test]
fn a_client_that_goes_away_frees_its_place() {
    let server = Server::start(&[]);
    let body = request(json!({ "stream": true, "ignore_eos": true, "max_tokens": 200 })).to_string();
    let mut stream = server.connect();
    std::io::Write::write_all(&mut stream, server.text("POST", PATH, &[], &body).as_bytes()).unwrap();
    let mut some = [0u8; 300];
    stream.read_exact(&mut some).unwrap();
    drop(stream);
    while server.figure("qwen:requests_in_flight") > 0.0 {}
}

/// The fixture with a token that begins calls.
fn with_calls() -> tempfile::TempDir {
    let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/qwen3");
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"] {
        std::fs::copy(fixture.join(name), folder.path().join(name)).unwrap();
    }
    let text = std::fs::read_to_string(fixture.join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text.replace("<think>", "<tool_call>")).unwrap();
    let tokens = tokenizer["added_tokens"].as_array_mut().unwrap();
    let token = tokens.iter_mut().find(|token| token["content"] == "<tool_call>").unwrap();
    token["special"] = false.into();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    folder
}

#[test]
fn calls_that_are_cut_are_no_content_in_streams_and_whole_answers() {
    let folder = with_calls();
    let server = Server::start(&["--model", folder.path().to_str().unwrap(), "--tool_call_parser", "hermes"]);
    let tool = json!({ "type": "function", "function": { "name": "plan", "parameters": {
        "type": "object", "properties": { "city": { "enum": ["Rome", "Oslo"] } }, "required": ["city"] } } });
    let mut begun = 0;
    for max_tokens in (1..40).step_by(3) {
        let mut body = request(json!({ "tools": [tool], "tool_choice": "required", "max_tokens": max_tokens }));
        let choice = server.ok(PATH, &body)["choices"][0].clone();
        let message = &choice["message"];
        assert_eq!(message["content"].as_str().unwrap_or_default().trim(), "", "{max_tokens}: {choice}");
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        begun += usize::from(!calls.is_empty());
        body["stream"] = true.into();
        let chunks = server.post(PATH, &body).chunks();
        let streamed = joined(&chunks);
        assert_eq!((streamed[0].0.as_str(), &streamed[0].1), ("", &choice["finish_reason"]), "{max_tokens}");
        let mut arguments = vec![String::new(); calls.len()];
        for call in chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array()).flatten() {
            let text = call["function"]["arguments"].as_str().unwrap();
            arguments[call["index"].as_u64().unwrap() as usize].push_str(text);
        }
        let whole: Vec<&str> = calls.iter().map(|call| call["function"]["arguments"].as_str().unwrap()).collect();
        assert_eq!(arguments, whole, "{max_tokens}");
        if max_tokens == 1 {
            assert_eq!(choice["finish_reason"], "length");
        }
    }
    assert!(begun > 0, "no call began within 40 tokens");
}

/// Also where it looks like a call of one of the tools.
#[test]
fn what_has_a_form_of_its_own_is_content() {
    let folder = with_calls();
    let server = Server::start(&["--model", folder.path().to_str().unwrap(), "--tool_call_parser", "llama3_json"]);
    let tool = json!({ "type": "function", "function": { "name": "plan" } });
    let text = "{\"name\": \"plan\", \"parameters\": {}}";
    let mut body = request(json!({ "tools": [tool], "guided_choice": [text], "max_tokens": 60 }));
    let choice = server.ok(PATH, &body)["choices"][0].clone();
    assert_eq!(choice["message"]["content"], text, "{choice}");
    assert!(choice["message"].get("tool_calls").is_none(), "{choice}");
    // And of what is cut there is as much as there is.
    body["max_tokens"] = 12.into();
    let choice = server.ok(PATH, &body)["choices"][0].clone();
    let content = choice["message"]["content"].as_str().unwrap();
    assert!(!content.is_empty() && text.starts_with(content), "{choice}");
}

#[test]
fn strict_functions_hold_when_the_model_calls_of_itself() {
    let folder = with_calls();
    let server = Server::start(&["--model", folder.path().to_str().unwrap(), "--tool_call_parser", "hermes"]);
    let schema = json!({
        "type": "object",
        "properties": { "city": { "enum": ["Rome", "Oslo"] }, "days": { "type": "integer", "minimum": 1, "maximum": 9 } },
        "required": ["city", "days"],
        "additionalProperties": false,
    });
    let tool = |strict: bool, schema: &Value| json!({ "type": "function", "function": { "name": "plan", "parameters": schema, "strict": strict } });
    // The model's weights are by chance: it is made to begin with a call, and to leave white space out where it may.
    let white = ["\t", "\n", "\r", " ", "  "]
        .map(|text| server.ok("/tokenize", &json!({ "prompt": text }))["tokens"][0].clone());
    let mut bias: serde_json::Map<String, Value> = white.iter().map(|id| (id.to_string(), json!(-100))).collect();
    bias.insert("3".into(), json!(100));
    for seed in 0..4 {
        let body = request(json!({
            "tools": [tool(true, &schema)], "logit_bias": bias, "seed": seed, "max_tokens": 120, "parallel_tool_calls": false,
        }));
        let message = server.ok(PATH, &body)["choices"][0]["message"].clone();
        let calls = message["tool_calls"].as_array().unwrap_or_else(|| panic!("{message}"));
        assert_eq!((calls.len(), &calls[0]["function"]["name"]), (1, &json!("plan")), "{message}");
        let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()), "{arguments}");
        assert!((1..=9).contains(&arguments["days"].as_u64().unwrap()), "{arguments}");
        assert_eq!(arguments.as_object().unwrap().len(), 2);
    }
    // With several calls each is held to it.
    let body = request(json!({ "tools": [tool(true, &schema)], "logit_bias": bias, "max_tokens": 200 }));
    let message = server.ok(PATH, &body)["choices"][0]["message"].clone();
    let calls = message["tool_calls"].as_array().unwrap();
    let complete = calls
        .iter()
        .filter_map(|call| serde_json::from_str::<Value>(call["function"]["arguments"].as_str().unwrap()).ok());
    let cities: Vec<Value> = complete.map(|arguments| arguments["city"].clone()).collect();
    assert!(cities.len() > 1 && cities.iter().all(|city| city == "Rome" || city == "Oslo"), "{message}");
    // Text stays free.
    let plain = server.ok(PATH, &request(json!({ "tools": [tool(true, &schema)], "logit_bias": { "3": -100 } })));
    let message = &plain["choices"][0]["message"];
    assert!(message.get("tool_calls").is_none() && !message["content"].as_str().unwrap().is_empty(), "{plain}");
    // What no grammar can hold is refused by name, but only where it was asked for.
    let impossible = json!({ "type": "object", "properties": { "a": { "$ref": "http://10.0.0.1/x.json" } } });
    let (status, code, param, message) = server.refused(PATH, &request(json!({ "tools": [tool(true, &impossible)] })));
    assert_eq!((status, code.as_str(), param.as_str()), (400, "invalid_grammar", "tools"), "{message}");
    server.ok(PATH, &request(json!({ "tools": [tool(false, &impossible)] })));
    // What turns out to have no end only on the way is the client's fault as well.
    let endless = json!({ "$ref": "#" });
    let forced = json!({ "tools": [tool(false, &endless)], "tool_choice": "required", "max_tokens": 200 });
    let (status, code, _, message) = server.refused(PATH, &request(forced));
    assert_eq!((status, code.as_str()), (400, "invalid_grammar"), "{message}");
    let wrong = json!({ "type": "function", "function": { "name": "f", "strict": "yes" } });
    assert_eq!(server.refused(PATH, &request(json!({ "tools": [wrong] }))).2, "tools[0]");
}
