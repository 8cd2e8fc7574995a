package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	epoch     = 1_700_000_000
	imageName = "registry.example.org:5000/np/nodeproxy:v1"
)

// build makes an image of these root files, and returns its archive.
func build(t *testing.T, root ...tar.Header) ([]byte, error) {
	t.Helper()
	dir := t.TempDir()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range root {
		h.ModTime, h.Uid, h.Uname = time.Now(), 1000, "somebody"
		content := []byte(h.Name)
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(content))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := w.Write(content); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	o := options{
		root: filepath.Join(dir, "root.tar"), binary: filepath.Join(dir, "nodeproxy"), output: filepath.Join(dir, "image.tar"),
		name: imageName, version: "v1", arch: "amd64",
	}
	if err := errors.Join(os.WriteFile(o.root, b.Bytes(), 0o644), os.WriteFile(o.binary, []byte("binary"), 0o644)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SOURCE_DATE_EPOCH", fmt.Sprint(epoch))
	if err := run(o); err != nil {
		return nil, err
	}
	return os.ReadFile(o.output)
}

// read reads a tar archive.
func read(t *testing.T, r io.Reader) map[string]file {
	t.Helper()
	out := map[string]file{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		out[h.Name] = file{*h, content}
	}
}

var someFiles = []tar.Header{
	{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755},
	{Typeflag: tar.TypeDir, Name: "./bin/", Mode: 0o755},
	{Typeflag: tar.TypeReg, Name: "./bin/tool", Mode: 0o755},
	{Typeflag: tar.TypeSymlink, Name: "./bin/link", Linkname: "tool", Mode: 0o777},
	{Typeflag: tar.TypeDir, Name: "./dev/", Mode: 0o755},
	{Typeflag: tar.TypeChar, Name: "./dev/null", Mode: 0o666},
}

func TestArchive(t *testing.T) {
	archive, err := build(t, someFiles...)
	if err != nil {
		t.Fatal(err)
	}
	again, err := build(t, someFiles...)
	if err != nil || !bytes.Equal(archive, again) {
		t.Errorf("the same input gives another archive (%v)", err)
	}

	layout := read(t, bytes.NewReader(archive))
	blob := func(d descriptor) []byte {
		t.Helper()
		content := layout[blobPath(d)].content
		if digest(content) != d.Digest || len(content) != d.Size {
			t.Fatalf("%+v: %d bytes with digest %s", d, len(content), digest(content))
		}
		return content
	}
	into := func(raw []byte, v any) {
		t.Helper()
		if err := json.Unmarshal(raw, v); err != nil {
			t.Fatalf("%v in %s", err, raw)
		}
	}
	var i index
	into(layout["index.json"].content, &i)
	note := i.Manifests[0].Annotations
	if note["io.containerd.image.name"] != imageName || note["org.opencontainers.image.ref.name"] != "v1" {
		t.Errorf("name %v", note)
	}
	var m manifest
	into(blob(i.Manifests[0]), &m)
	var c imageConfig
	into(blob(m.Config), &c)
	if c.Architecture != "amd64" || c.OS != "linux" || c.Created != "2023-11-14T22:13:20Z" || len(m.Layers) != 2 {
		t.Errorf("config %+v, manifest %+v", c, m)
	}
	files := map[string]file{}
	for n, layer := range m.Layers {
		z, err := gzip.NewReader(bytes.NewReader(blob(layer)))
		if err != nil {
			t.Fatal(err)
		}
		plain, err := io.ReadAll(z)
		if err != nil || digest(plain) != c.RootFS.DiffIDs[n] {
			t.Errorf("layer %d: %v, digest %s, want %s", n, err, digest(plain), c.RootFS.DiffIDs[n])
		}
		for name, f := range read(t, bytes.NewReader(plain)) {
			files[name] = f
		}
	}
	contents := map[string]string{"bin/tool": "./bin/tool", "usr/bin/nodeproxy": "binary", "bin/": "", "bin/link": ""}
	for name, content := range contents {
		f := files[name]
		if string(f.content) != content || f.header.ModTime.Unix() != epoch || f.header.Uid != 0 || f.header.Uname != "" {
			t.Errorf("%s: %q, %+v", name, f.content, f.header)
		}
	}
	if files["bin/link"].header.Linkname != "tool" || files["bin/tool"].header.Mode != 0o755 {
		t.Errorf("%+v, %+v", files["bin/link"].header, files["bin/tool"].header)
	}
	for name := range files {
		if strings.HasPrefix(name, "dev") {
			t.Errorf("%s is in the image", name)
		}
	}
	var docker []struct {
		Config           string
		RepoTags, Layers []string
	}
	into(layout["manifest.json"].content, &docker)
	if docker[0].Config != blobPath(m.Config) || docker[0].Layers[1] != blobPath(m.Layers[1]) {
		t.Errorf("manifest.json %+v", docker)
	}
}

func TestWhatHasNoPlaceInAnImage(t *testing.T) {
	_, err := build(t, tar.Header{Typeflag: tar.TypeFifo, Name: "./pipe", Mode: 0o644})
	if err == nil || !strings.Contains(err.Error(), "pipe: an entry of type '6' has no place in an image") {
		t.Errorf("a FIFO: %v", err)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "")
	err = run(options{root: "a", binary: "b", output: "c", name: "d"})
	if err == nil || !strings.Contains(err.Error(), "SOURCE_DATE_EPOCH") {
		t.Errorf("no time: %v", err)
	}
	if err := run(options{root: "a"}); err == nil {
		t.Error("nothing is missing")
	}
}
