//! Runs the real programs, with nothing of the developer's environment that changes what they print.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// The program `qwen`.
pub(crate) fn qwen() -> Command {
    program(env!("CARGO_BIN_EXE_qwen"))
}

/// The program `qwen-eval`.
pub(crate) fn qwen_eval() -> Command {
    program(env!("CARGO_BIN_EXE_qwen-eval"))
}

/// The program `qwen-bench`.
pub(crate) fn qwen_bench() -> Command {
    program(env!("CARGO_BIN_EXE_qwen-bench"))
}

/// The program `qwen-compile`.
pub(crate) fn qwen_compile() -> Command {
    program(env!("CARGO_BIN_EXE_qwen-compile"))
}

/// The program `qwen-hal-check`.
pub(crate) fn hal_check() -> Command {
    program(env!("CARGO_BIN_EXE_qwen-hal-check"))
}

fn program(path: &str) -> Command {
    let mut command = Command::new(path);
    command.stdin(Stdio::null()).current_dir(fixtures());
    for name in ["RUST_LOG", "COLUMNS", "CLICOLOR", "CLICOLOR_FORCE", "QWEN_THREADS", "QWEN_HAL_PATH"] {
        command.env_remove(name);
    }
    command
}

/// The folder of fixtures, which is the programs' working directory too.
pub(crate) fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// What a command that succeeds prints.
pub(crate) fn stdout(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Exit code, standard output and standard error as one text, for snapshots.
pub(crate) fn transcript(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    format!("exit {}\n{}{}", status.code().unwrap(), text(stdout), text(stderr))
}
