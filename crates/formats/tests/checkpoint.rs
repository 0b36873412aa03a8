//! Checkpoints on disk: every container and every way in which their files can contradict each other.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::path::{Path, PathBuf};

use qwen_formats::test_support::{GgufBuilder, raw_safetensors, safetensors};
use qwen_formats::{Checkpoint, Container, DType, FormatError};
use tempfile::TempDir;

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn with(self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        std::fs::write(self.path(name), bytes).unwrap();
        self
    }

    /// The message of the error that opening `name` gives, with the folder's own path cut out.
    fn error(&self, name: &str) -> String {
        let folder = format!("{}/", self.0.path().display());
        open(&self.path(name)).unwrap_err().to_string().replace(&folder, "")
    }
}

fn open(path: &Path) -> Result<Checkpoint, FormatError> {
    Checkpoint::open(path)
}

fn part(number: u16, count: u16, tensor: &str) -> GgufBuilder {
    GgufBuilder::new()
        .u16("split.no", number)
        .u16("split.count", count)
        .i32("split.tensors.count", i32::from(count))
        .tensor(tensor, DType::F32, &[2], &[number as u8; 8])
}

fn split() -> Folder {
    Folder::new()
        .with("m-00001-of-00003.gguf", part(0, 3, "b").build())
        .with("m-00002-of-00003.gguf", part(1, 3, "a").build())
        .with("m-00003-of-00003.gguf", part(2, 3, "c").build())
}

fn sharded() -> Folder {
    Folder::new()
        .with("1.safetensors", safetensors(&[("b", "U8", &[2], &[1, 2])]))
        .with("2.safetensors", safetensors(&[("a", "U8", &[1], &[3]), ("c", "U8", &[1], &[4])]))
        .with(
            "model.safetensors.index.json",
            r#"{"weight_map":{"a":"2.safetensors","b":"1.safetensors","c":"2.safetensors"}}"#,
        )
}

#[test]
fn split_gguf_is_one_checkpoint() {
    let folder = split();
    let checkpoint = open(&folder.path("m-00001-of-00003.gguf")).unwrap();
    let names: Vec<_> = checkpoint.tensors().map(|info| (info.name.as_str(), info.shard)).collect();
    assert_eq!(names, [("a", 1), ("b", 0), ("c", 2)]);
    assert_eq!(checkpoint.tensor("c").unwrap().data, [2; 8]);
    assert_eq!(checkpoint.total_bytes(), 24);
    assert!(checkpoint.info("d").is_none());
}

#[test]
fn split_gguf_parts_must_agree() {
    let first = "m-00001-of-00003.gguf";
    assert_eq!(
        split().error("m-00002-of-00003.gguf"),
        "m-00002-of-00003.gguf: part number: expected part 1 to be opened, found part 2 of 3; the files are not from \
         one checkpoint, download them again"
    );
    let missing = split();
    std::fs::remove_file(missing.path("m-00003-of-00003.gguf")).unwrap();
    assert_eq!(
        missing.error(first),
        "m-00001-of-00003.gguf: the checkpoint needs m-00003-of-00003.gguf, which is missing; download it into the \
         same directory"
    );
    let repeated = split().with("m-00003-of-00003.gguf", part(1, 3, "c").build());
    assert!(repeated.error(first).contains("metadata key split.no: expected 2, found 1"));
    let other_count = split().with("m-00002-of-00003.gguf", part(1, 4, "a").build());
    assert!(other_count.error(first).contains("metadata key split.count: expected 3, found 4"));
    let plain =
        split().with("m-00002-of-00003.gguf", GgufBuilder::new().tensor("a", DType::F32, &[1], &[0; 4]).build());
    assert!(plain.error(first).contains("metadata key split.no is missing"));
    let duplicate = split().with("m-00002-of-00003.gguf", part(1, 3, "b").build());
    assert!(duplicate.error(first).contains("tensor \"b\" occurs twice"));
    let more = split().with("m-00002-of-00003.gguf", part(1, 3, "a").tensor("x", DType::F32, &[1], &[0; 4]).build());
    assert!(more.error(first).contains("split.tensors.count: expected 4 tensors, as the parts have, found 3"));
    let renamed = Folder::new().with("model.gguf", part(0, 3, "b").build());
    assert!(renamed.error("model.gguf").contains("expected a name that ends in -00001-of-00003.gguf"));
    let many = Folder::new().with("m-00001-of-65535.gguf", part(0, u16::MAX, "b").build());
    assert!(many.error("m-00001-of-65535.gguf").contains("m-00002-of-65535.gguf, which is missing"));
}

#[cfg(unix)]
#[test]
fn a_part_that_links_back_to_the_first_is_refused() {
    let folder = split();
    std::fs::remove_file(folder.path("m-00002-of-00003.gguf")).unwrap();
    let (first, second) = (folder.path("m-00001-of-00003.gguf"), folder.path("m-00002-of-00003.gguf"));
    std::os::unix::fs::symlink(&first, &second).unwrap();
    assert!(folder.error("m-00001-of-00003.gguf").contains("split.no: expected 1, found 0"));
    std::fs::remove_file(&second).unwrap();
    std::os::unix::fs::symlink(&second, &second).unwrap();
    assert!(folder.error("m-00001-of-00003.gguf").contains("which is missing"));
}

#[test]
fn sharded_safetensors_is_one_checkpoint() {
    let folder = sharded();
    for path in [folder.0.path().to_path_buf(), folder.path("model.safetensors.index.json")] {
        let checkpoint = open(&path).unwrap();
        assert_eq!(checkpoint.container(), Container::Safetensors);
        assert_eq!(checkpoint.tensors().map(|info| info.name.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(checkpoint.tensor("c").unwrap().data, [4]);
        assert_eq!(checkpoint.path(), path);
    }
}

#[test]
fn index_and_shards_must_agree() {
    let index = "model.safetensors.index.json";
    let missing = sharded();
    std::fs::remove_file(missing.path("1.safetensors")).unwrap();
    assert!(missing.error(index).contains("the checkpoint needs 1.safetensors, which is missing"));
    let lacking = sharded().with("2.safetensors", safetensors(&[("a", "U8", &[1], &[3])]));
    assert!(
        lacking
            .error(index)
            .contains("2.safetensors: comparison with the index: expected tensor \"c\", found no such tensor")
    );
    let surplus = sharded().with("1.safetensors", safetensors(&[("b", "U8", &[1], &[1]), ("bb", "U8", &[1], &[1])]));
    assert!(surplus.error(index).contains("only tensors that the index lists here, found tensor \"bb\""));
    let outside = sharded().with(index, r#"{"weight_map":{"a":"../2.safetensors"}}"#);
    assert!(outside.error(index).contains("expected plain file names"));
    let own = sharded().with(index, format!(r#"{{"weight_map":{{"a":"{index}"}}}}"#));
    assert!(own.error(index).contains("expected plain file names"));
    let empty = sharded().with(index, "");
    assert!(empty.error(index).contains("expected JSON"));
}

#[test]
fn foreign_files_are_refused() {
    let folder = Folder::new()
        .with("model.bin", b"PK\x03\x04rest of a zip")
        .with("empty", b"")
        .with("empty.gguf", b"")
        .with("empty.safetensors", b"")
        .with("notes.txt", b"hello, this is text")
        .with("page.gguf", b"<!DOCTYPE html>");
    assert!(folder.error("model.bin").contains("uses Python pickle, which is not supported"));
    assert!(folder.error("empty").contains("expected a GGUF or safetensors file"));
    assert!(folder.error("empty.gguf").contains("truncated: magic bytes needs bytes 0..4 but the file has 0"));
    assert!(folder.error("empty.safetensors").contains("truncated: header length"));
    assert!(folder.error("notes.txt").contains("a file that starts with \"hello, t\""));
    assert!(folder.error("page.gguf").contains("found \"<!DO\""));
    assert!(folder.error("absent.gguf").contains("cannot open the file"));
    assert!(folder.error("").contains("model.safetensors or model.safetensors.index.json in the directory"));
}

#[test]
fn files_are_recognised_by_content() {
    let folder = Folder::new()
        .with("blob1", GgufBuilder::new().tensor("a", DType::F32, &[1], &[0; 4]).build())
        .with("blob2", safetensors(&[("a", "U8", &[1], &[1])]));
    assert_eq!(open(&folder.path("blob1")).unwrap().container(), Container::Gguf);
    assert_eq!(open(&folder.path("blob2")).unwrap().container(), Container::Safetensors);
}

#[test]
fn mappings_outlive_the_checkpoint_and_release_keeps_the_bytes() {
    let values: Vec<u8> = (0..40_000u32).map(|i| (i % 241) as u8).collect();
    let json = r#"{"a":{"dtype":"U8","shape":[40000],"data_offsets":[0,40000]}}"#;
    let folder = Folder::new().with("model.safetensors", raw_safetensors(json, &values));
    let checkpoint = open(folder.0.path()).unwrap();
    let info = checkpoint.info("a").unwrap().clone();
    checkpoint.release(&info);
    assert_eq!(checkpoint.view(&info).unwrap().data, values);
    let mapping = checkpoint.mapping(info.shard).unwrap();
    assert!(checkpoint.mapping(1).is_none());
    drop(checkpoint);
    let start = info.offset as usize;
    assert_eq!(mapping[start..start + values.len()], values);
}

#[test]
fn truncation_at_every_64th_is_an_error_that_names_the_file() {
    let gguf = part(0, 1, "a").strings("tokens", (0..100).map(|i| i.to_string())).build();
    let tensors = safetensors(&[("a", "F32", &[50], &[0; 200]), ("b", "U8", &[30], &[0; 30])]);
    for (name, bytes) in [("m.gguf", gguf), ("m.safetensors", tensors)] {
        for step in 0..64 {
            let folder = Folder::new().with(name, &bytes[..bytes.len() * step / 64]);
            let error = folder.error(name);
            assert!(error.starts_with(name) && error.contains("truncated"), "{step}: {error}");
        }
    }
}
