//! `/v1/responses` and `/v1/messages`: whole answers, named events, errors in each protocol's shape.

use serde_json::{Value, json};

use crate::client::{MODEL, Server};

#[test]
fn responses_whole_and_streamed() {
    let server = Server::start(&[]);
    let mut body =
        json!({ "model": MODEL, "input": "hello", "instructions": "be brief", "max_output_tokens": 12, "seed": 5 });
    let whole = server.ok("/v1/responses", &body);
    assert_eq!((&whole["object"], &whole["store"]), (&json!("response"), &json!(false)));
    let text = whole["output"][0]["content"][0]["text"].as_str().unwrap().to_owned();
    body["stream"] = true.into();
    let events = server.post("/v1/responses", &body).events();
    let parsed: Vec<Value> = events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect();
    for (i, ((name, _), event)) in events.iter().zip(&parsed).enumerate() {
        assert_eq!((&event["type"], &event["sequence_number"]), (&json!(name), &json!(i)));
    }
    let delta: String = parsed
        .iter()
        .filter(|e| e["type"] == "response.output_text.delta")
        .filter_map(|e| e["delta"].as_str())
        .collect();
    assert_eq!(delta, text);
    let last = parsed.last().unwrap();
    assert_eq!(last["response"]["status"], whole["status"]);
    // The second time the prompt is in the prefix cache.
    for name in ["input_tokens", "output_tokens", "total_tokens"] {
        assert_eq!(last["response"]["usage"][name], whole["usage"][name]);
    }
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        &names[..4],
        ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    );
    for (more, param) in [
        (json!({ "previous_response_id": "resp_1" }), "previous_response_id"),
        (json!({ "background": true }), "background"),
        (json!({ "truncation": "auto" }), "truncation"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "input": [{ "type": "item_reference", "id": "x" }] }), "input[0].type"),
        (json!({ "input": [{ "role": "tool", "content": "a" }], "instructions": "b" }), "input[0].role"),
        (json!({ "tools": [{ "type": "function", "name": "f", "cost": 1 }] }), "tools[0].cost"),
        (json!({ "text": { "format": { "type": "text" }, "verbosity": "low" } }), "text.verbosity"),
        (json!({ "reasoning": { "effort": 3 } }), "reasoning.effort"),
        (json!({ "n": 2 }), "n"),
        (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
        (json!({ "max_output_tokens": 100_000 }), "max_output_tokens"),
        (json!({ "input": "a ".repeat(1000) }), "max_output_tokens"),
        // So long that its bytes alone tell.
        (json!({ "input": "a ".repeat(5000) }), "input"),
        (json!({ "text": { "format": { "type": "xml" } } }), "text.format"),
        (json!({ "text": { "format": { "type": "json_schema", "name": "x" } } }), "text.format"),
        (
            json!({ "text": { "format": { "type": "json_schema", "name": "x", "schema": { "type": "no" } } } }),
            "text.format",
        ),
        (json!({ "text": { "format": { "type": "regex", "pattern": "(" } } }), "text.format"),
        (json!({ "tools": [{ "type": "function", "name": "a b" }] }), "tools[0]"),
        (json!({ "text": { "format": { "type": "text", "depth": 1 } } }), "text.format.depth"),
        (json!({ "reasoning": { "effort": "much" } }), "reasoning.effort"),
        (json!({ "enable_thinking": "yes" }), "enable_thinking"),
    ] {
        let mut wrong = json!({ "input": "a" });
        wrong.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (_, _, found, message) = server.refused("/v1/responses", &wrong);
        assert_eq!(found, param, "{message}");
        for ours in ["messages", "max_tokens", "max_completion_tokens", "response_format", "function.name"] {
            assert!(!message.contains(ours), "{message}");
        }
    }
    // What asks for what is done anyhow, and what came with earlier items.
    let item = json!({ "type": "message", "role": "user", "content": "a", "mood": 1 });
    let harmless = json!({ "input": [item], "text": { "verbosity": "medium" }, "n": 1, "max_output_tokens": 2 });
    let reply = server.post("/v1/responses", &harmless);
    assert_eq!((reply.status, reply.header("x-ignored-parameters")), (200, Some("input[0].mood")), "{}", reply.body);
}

#[test]
fn messages_whole_and_streamed() {
    let server = Server::start(&[]);
    let mut body = json!({ "model": MODEL, "max_tokens": 12, "seed": 5, "system": "be brief", "messages": [{ "role": "user", "content": "hello" }] });
    let whole = server.ok("/v1/messages", &body);
    assert_eq!((&whole["type"], &whole["role"]), (&json!("message"), &json!("assistant")));
    let text = whole["content"][0]["text"].as_str().unwrap_or_default().to_owned();
    let counted = server.ok("/v1/messages/count_tokens", &body);
    let usage = &whole["usage"];
    let input = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(counted["input_tokens"], input);
    body["stream"] = true.into();
    let events = server.post("/v1/messages", &body).events();
    let parsed: Vec<Value> = events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect();
    assert!(events.iter().zip(&parsed).all(|((name, _), event)| event["type"] == name.as_str()));
    let delta: String = parsed.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(delta, text);
    let end = &parsed[parsed.len() - 2];
    assert_eq!(
        (&end["delta"]["stop_reason"], &end["usage"]["output_tokens"]),
        (&whole["stop_reason"], &usage["output_tokens"])
    );
    assert_eq!(events.last().map(|(name, _)| name.as_str()), Some("message_stop"));
    for wrong in [
        json!({ "messages": [{ "role": "user", "content": "a" }] }),
        json!({ "max_tokens": 5, "messages": [{ "role": "user", "content": [{ "type": "image" }] }] }),
        json!({ "max_tokens": 5, "messages": [], "mcp_servers": [{}] }),
        json!({ "max_tokens": 5, "messages": [{ "role": "user", "content": "a" }], "tools": [{ "name": "f", "cost": 1 }] }),
        json!({ "max_tokens": 5, "messages": [{ "role": "user", "content": "a" }], "tool_choice": { "type": "auto", "x": 1 } }),
        json!({ "max_tokens": 5, "messages": [{ "role": "user", "content": "a" }], "seed": "x" }),
    ] {
        let reply = server.post("/v1/messages", &wrong);
        assert_eq!(
            (reply.status, &reply.json()["type"], &reply.json()["error"]["type"]),
            (400, &json!("error"), &json!("invalid_request_error"))
        );
    }
    let asked = |more: Value| {
        let mut body = json!({ "max_tokens": 5, "messages": [{ "role": "user", "content": "a" }] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/messages", &body)
    };
    for (more, told) in [
        (json!({ "stop_sequences": [""] }), "stop_sequences: expected texts of 1"),
        (json!({ "tools": [{ "name": "a b", "input_schema": {} }] }), "tools[0]: expected name of 1"),
        (json!({ "tools": [{ "name": "f", "input_schema": 3 }] }), "tools[0]: expected input_schema to be"),
        (json!({ "max_tokens": -1 }), "expected a whole number of 0 or more"),
    ] {
        let message = asked(more).json()["error"]["message"].clone();
        assert!(message.as_str().unwrap().contains(told), "{message}");
    }
    let text = json!([{ "type": "text", "text": "a", "mood": 1 }]);
    let reply = asked(json!({ "messages": [{ "role": "user", "content": text, "id": "x" }] }));
    let ignored = Some("messages[0].id, messages[0].content[0].mood");
    assert_eq!((reply.status, reply.header("x-ignored-parameters")), (200, ignored), "{}", reply.body);
}
