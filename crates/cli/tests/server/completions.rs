//! `/v1/completions`, `/tokenize`, `/detokenize`.

use serde_json::{Value, json};

use crate::client::{MODEL, Server};

const PATH: &str = "/v1/completions";

#[test]
fn prompts_of_every_form() {
    let server = Server::start(&[]);
    let ids = server.ok("/tokenize", &json!({ "prompt": "hello world" }))["tokens"].clone();
    let ask = |prompt: Value| {
        server.ok(PATH, &json!({ "prompt": prompt, "temperature": 0, "max_tokens": 8 }))["choices"].clone()
    };
    let text = ask(json!("hello world"));
    assert_eq!(text, ask(ids.clone()));
    let both = ask(json!(["hello world", "other"]));
    assert_eq!((both.as_array().unwrap().len(), &both[0]), (2, &text[0]));
    assert_eq!(ask(json!([ids, [1, 2, 3]]))[0], text[0]);
    let many = server.ok(PATH, &json!({ "prompt": ["a", "b"], "n": 2, "max_tokens": 2, "seed": 1 }));
    let indices: Vec<u64> = many["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let by_default = server.ok(PATH, &json!({ "prompt": "a", "ignore_eos": true }));
    assert_eq!((&by_default["usage"]["completion_tokens"], &by_default["model"]), (&json!(16), &json!(MODEL)));
}

#[test]
fn streams_are_the_same_as_whole_answers() {
    let server = Server::start(&[]);
    for more in [json!({}), json!({ "echo": true }), json!({ "logprobs": 1, "n": 2 })] {
        let mut body = json!({ "prompt": ["hello", "world"], "seed": 3, "max_tokens": 10 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let whole = server.ok(PATH, &body);
        body["stream"] = true.into();
        let chunks = server.post(PATH, &body).chunks();
        for choice in whole["choices"].as_array().unwrap() {
            let own = || chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|c| c["index"] == choice["index"]);
            let text: String = own().filter_map(|c| c["text"].as_str()).collect();
            assert_eq!(choice["text"], text);
            let offsets: Vec<Value> =
                own().filter_map(|c| c["logprobs"]["text_offset"].as_array().cloned()).flatten().collect();
            assert_eq!(choice["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default(), offsets);
        }
    }
}

#[test]
fn what_can_not_be_done_is_refused_by_name() {
    let server = Server::start(&[]);
    for (body, param) in [
        (json!({ "prompt": "a", "suffix": "b" }), "suffix"),
        (json!({ "prompt": "a", "best_of": 3 }), "best_of"),
        (json!({ "prompt": "a", "max_tokens": 0 }), "max_tokens"),
        (json!({ "prompt": "a", "max_tokens": 300 }), "max_tokens"),
        (json!({ "prompt": "" }), "prompt"),
        (json!({ "prompt": [] }), "prompt"),
        (json!({ "prompt": [-1] }), "prompt"),
        (json!({ "prompt": [4_294_967_296u64] }), "prompt"),
        (json!({ "prompt": [320] }), "prompt"),
        (json!({ "prompt": [[1], "a", 3] }), "prompt[2]"),
        (json!({ "prompt": ["a", ""] }), "prompt[1]"),
        (json!({ "prompt": [[1], [320]] }), "prompt[1]"),
        (json!({ "prompt": ["a", "a".repeat(5000), "b"] }), "prompt[1]"),
        (json!({ "prompt": ["a", "bbbbbbbbbb"], "max_tokens": 250 }), "prompt[1]"),
        (json!({ "prompt": "a", "logprobs": 21 }), "logprobs"),
        (json!({ "prompt": "a".repeat(5000) }), "max_tokens"),
        (json!({ "prompt": "a", "stop": vec!["x"; 17] }), "stop"),
    ] {
        let (status, _, name, message) = server.refused(PATH, &body);
        assert_eq!((status, name.as_str()), (400, param), "{body}: {message}");
    }
}

#[test]
fn tokens_and_back() {
    let server = Server::start(&[]);
    let tokens = server.ok("/tokenize", &json!({ "content": "hello 中", "return_token_strs": true }));
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    assert_eq!(server.ok("/detokenize", &json!({ "tokens": tokens["tokens"] }))["prompt"], "hello 中");
    let chat = server.ok("/tokenize", &json!({ "messages": [{ "role": "user", "content": "hi" }] }));
    let text = server.ok("/detokenize", &json!({ "tokens": chat["tokens"] }))["content"].clone();
    assert_eq!(text, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(server.refused("/detokenize", &json!({ "tokens": [99_999] })).2, "tokens");
    assert_eq!(server.refused("/tokenize", &json!({})).2, "prompt");
}
