//! `include/qwen_hal.h` is generated from this crate, and C and C++ compilers see the layout that Rust sees.
//!
//! `QWEN_WRITE_HEADER=1 cargo test -p qwen-hal-abi --test header` writes it anew.
#![cfg(target_pointer_width = "64")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers are part of tests")]

use std::path::{Path, PathBuf};
use std::process::Command;

use cbindgen::{Config, DocumentationLength, DocumentationStyle, Language, Style};

fn header_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include/qwen_hal.h")
}

/// What no Rust item of the crate says.
const SYMBOLS: &str = r#"#if defined(_WIN32)
#define QHAL_EXPORT __declspec(dllexport)
#else
#define QHAL_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The two symbols that a plugin exports. The manifest is static data: no side effects, no driver call.
QHAL_EXPORT const qhal_manifest *qhal_plugin_manifest(void);
// The table, or null if the plugin declines this host. The host table stays valid for the life of the process.
QHAL_EXPORT const qhal_plugin_api *qhal_plugin_query(uint32_t host_major,
                                                     uint32_t host_minor,
                                                     const qhal_host_api *host);

#ifdef __cplusplus
}
#endif
"#;

fn generated() -> String {
    let mut config = Config {
        language: Language::C,
        cpp_compat: true,
        style: Style::Both,
        include_guard: Some("QWEN_HAL_H".into()),
        no_includes: true,
        sys_includes: vec!["stdint.h".into(), "stddef.h".into()],
        documentation_style: DocumentationStyle::C99,
        documentation_length: DocumentationLength::Full,
        line_length: 120,
        tab_width: 4,
        ..Config::default()
    };
    config.header = Some(
        "// The C ABI between the Qwen inference runtime and a device plugin.\n\
         // Generated from crates/hal-abi by its test `header`; do not edit. Guide: docs/hal.md.\n//\n\
         // A plugin is a shared object libhal_NAME.so that exports qhal_plugin_manifest and qhal_plugin_query."
            .into(),
    );
    let opaque = ["qhal_device", "qhal_buffer", "qhal_stream", "qhal_event", "qhal_plan", "qhal_cmdlist", "qhal_comm"];
    config.after_includes = Some(
        "\n// Objects of the plugin, which alone knows what they are.\n".to_owned()
            + &opaque.map(|name| format!("typedef struct {name} {name};\n")).concat(),
    );
    config.export.exclude = opaque.into_iter().chain(["LinkedPlugin"]).map(str::to_owned).collect();
    // No function of the crate leads to the structs; the layout test's list is complete.
    let structs = include_str!("layout.txt").lines().filter(|line| !line.starts_with(' '));
    config.export.include = structs.filter_map(|line| line.split(' ').next()).map(str::to_owned).collect();
    let bindings =
        cbindgen::Builder::new().with_config(config).with_crate(env!("CARGO_MANIFEST_DIR")).generate().unwrap();
    let mut text = Vec::new();
    bindings.write(&mut text);
    // Links of the documentation mean nothing to readers of C.
    let text = String::from_utf8(text).unwrap().replace("[`crate::", "`").replace("[`", "`").replace("`]", "`");
    let text = text.replace("#endif  /* QWEN_HAL_H */", &format!("{SYMBOLS}\n#endif  /* QWEN_HAL_H */"));
    text.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[test]
fn header_is_the_generated_one() {
    let (path, text) = (header_path(), generated());
    if std::env::var_os("QWEN_WRITE_HEADER").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let published = std::fs::read_to_string(&path).unwrap_or_default();
    for (line, (found, expected)) in published.lines().zip(text.lines()).enumerate() {
        assert_eq!(found, expected, "line {}: write it anew as the opening comment of this test says", line + 1);
    }
    assert_eq!(published, text);
}

/// A program that does not compile where a size or an offset differs from `layout.txt`.
fn layout_program() -> String {
    let mut program = String::from("#include \"qwen_hal.h\"\n#include <stddef.h>\n");
    let (mut current, mut count) = (String::new(), 0);
    for line in include_str!("layout.txt").lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let condition = match words[..] {
            [name, "size", size, "align", _] => {
                name.clone_into(&mut current);
                format!("sizeof({name}) == {size}")
            }
            // A word of C++.
            [offset, "class"] => format!("offsetof({current}, class_) == {offset}"),
            [offset, field] => format!("offsetof({current}, {field}) == {offset}"),
            _ => panic!("{line}"),
        };
        count += 1;
        // Valid in every C and C++, unlike either's static assertion.
        program += &format!("typedef char check_{count}[({condition}) ? 1 : -1]; /* {current} */\n");
    }
    assert!(count > 200, "{count} checks");
    program
        + "int main(void) { return QHAL_ABI_MAJOR == 0 && QHAL_DTYPE_NONE == 0xffffffffu && \
               QHAL_OP_SOFTMAX == 18u && QHAL_FEATURE_INLINE == (1ull << 14) ? 0 : 1; }\n"
}

#[test]
fn c_and_cpp_compilers_see_the_same_layout() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    for (compiler, standard, extension) in
        [("cc", "c99", "c"), ("cc", "c11", "c"), ("c++", "c++11", "cpp"), ("c++", "c++17", "cpp")]
    {
        let source = folder.join(format!("layout_{}.{extension}", standard.replace('+', "p")));
        let program = folder.join(format!("layout_{}.out", standard.replace('+', "p")));
        std::fs::write(&source, layout_program()).unwrap();
        let output = Command::new(compiler)
            .arg(format!("-std={standard}"))
            .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wno-unused-local-typedefs", "-I"])
            .arg(header_path().parent().unwrap())
            .arg(&source)
            .arg("-o")
            .arg(&program)
            .output();
        let output = match output {
            Ok(output) => output,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && compiler == "c++" => {
                eprintln!("SKIPPED {standard}: no {compiler} on this machine");
                continue;
            }
            Err(error) => panic!("{compiler}: {error}"),
        };
        assert!(output.status.success(), "{standard}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(Command::new(&program).status().unwrap().success(), "{standard}: constants");
    }
}
