//! Writes the text of the IR's small models, as built and after every pass, into a folder: seeds of the target `ir_text`.
//!
//! ```text
//! cargo run -p qwen-fuzz --example ir_seeds FOLDER
//! ```
#![expect(clippy::unwrap_used, reason = "a tool that may fail loudly")]

use std::path::PathBuf;

use qwen_ir::passes::{CompileOptions, PassName, PermissiveDevice, compile};
use qwen_ir::{Phase, test_support, text};

fn main() {
    let folder = PathBuf::from(std::env::args_os().nth(1).unwrap());
    std::fs::create_dir_all(&folder).unwrap();
    for graph in test_support::all().unwrap() {
        std::fs::write(folder.join(format!("{}.ir", graph.name)), text::print(&graph)).unwrap();
        for pass in PassName::ALL {
            let mut options = CompileOptions::new(Phase::Mixed, test_support::bounds());
            options.dump_after = Some(pass);
            let dump = compile(&graph, &options, &PermissiveDevice).unwrap().dump.unwrap();
            std::fs::write(folder.join(format!("{}-{pass}.ir", graph.name)), dump).unwrap();
        }
    }
}
