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

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"

	"nodeproxy/deploy/oci"
)

const (
	epoch     = 1_700_000_000
	imageName = "registry.example.org:5000/np/nodeproxy:v1"
)

// build makes an image of these root files for some architectures, and returns its archive and its digest.
func build(t *testing.T, archs []string, root ...tar.Header) ([]byte, string, error) {
	t.Helper()
	dir := t.TempDir()
	var files []oci.File
	for _, h := range root {
		f := oci.File{Header: h}
		f.Header.ModTime, f.Header.Uid, f.Header.Uname = time.Now(), 1000, "somebody"
		if h.Typeflag == tar.TypeReg {
			f.Content = []byte(h.Name)
		}
		files = append(files, f)
	}
	archive, err := oci.Tar(files, time.Now())
	require.NoError(t, err)
	o := options{output: filepath.Join(dir, "image.tar"), name: imageName, version: "v1"}
	for _, arch := range archs {
		p := platform{arch, filepath.Join(dir, arch+".tar"), filepath.Join(dir, arch)}
		require.NoError(t, errors.Join(os.WriteFile(p.root, archive, 0o644), os.WriteFile(p.binary, []byte("binary for "+arch), 0o644)))
		require.NoError(t, o.addPlatform(fmt.Sprintf("%s=%s,%s", arch, p.root, p.binary)))
	}
	t.Setenv("SOURCE_DATE_EPOCH", fmt.Sprint(epoch))
	digest, _, err := run(o)
	if err != nil {
		return nil, "", err
	}
	archive, err = os.ReadFile(o.output)
	return archive, digest, err
}

// read reads a tar archive.
func read(t *testing.T, r io.Reader) map[string]oci.File {
	t.Helper()
	out := map[string]oci.File{}
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(t, err)
		content, err := io.ReadAll(in)
		require.NoError(t, err)
		out[h.Name] = oci.File{Header: *h, Content: content}
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

// layout is an archive that was read.
type layout struct {
	t     *testing.T
	files map[string]oci.File
}

func (l layout) blob(d v1.Descriptor) []byte {
	l.t.Helper()
	content := l.files[oci.Path(d)].Content
	if digest.FromBytes(content) != d.Digest || int64(len(content)) != d.Size {
		l.t.Fatalf("%+v: %d bytes with digest %s", d, len(content), digest.FromBytes(content))
	}
	return content
}

func into(t *testing.T, raw []byte, v any) {
	t.Helper()
	if err := json.Unmarshal(raw, v); err != nil {
		t.Fatalf("%v in %s", err, raw)
	}
}

// checkImage checks the image of one platform, and returns its manifest.
func (l layout) checkImage(d v1.Descriptor, arch string) v1.Manifest {
	t := l.t
	t.Helper()
	var m v1.Manifest
	into(t, l.blob(d), &m)
	var c v1.Image
	into(t, l.blob(m.Config), &c)
	if c.Architecture != arch || c.OS != "linux" || c.Created.Unix() != epoch || len(m.Layers) != 2 || d.Platform.Architecture != arch {
		t.Errorf("config %+v, manifest %+v, descriptor %+v", c, m, d)
	}
	files := map[string]oci.File{}
	for n, layer := range m.Layers {
		z, err := gzip.NewReader(bytes.NewReader(l.blob(layer)))
		require.NoError(t, err)
		plain, err := io.ReadAll(z)
		if err != nil || digest.FromBytes(plain) != c.RootFS.DiffIDs[n] {
			t.Errorf("layer %d: %v, digest %s, want %s", n, err, digest.FromBytes(plain), c.RootFS.DiffIDs[n])
		}
		for name, f := range read(t, bytes.NewReader(plain)) {
			files[name] = f
		}
	}
	contents := map[string]string{"bin/tool": "./bin/tool", "usr/bin/nodeproxy": "binary for " + arch, "bin/": "", "bin/link": ""}
	for name, content := range contents {
		f := files[name]
		if string(f.Content) != content || f.Header.ModTime.Unix() != epoch || f.Header.Uid != 0 || f.Header.Uname != "" {
			t.Errorf("%s: %q, %+v", name, f.Content, f.Header)
		}
	}
	if files["bin/link"].Header.Linkname != "tool" || files["bin/tool"].Header.Mode != 0o755 {
		t.Errorf("%+v, %+v", files["bin/link"].Header, files["bin/tool"].Header)
	}
	for name := range files {
		if strings.HasPrefix(name, "dev") {
			t.Errorf("%s is in the image", name)
		}
	}
	return m
}

func TestArchive(t *testing.T) {
	for _, archs := range [][]string{{"amd64"}, {"amd64", "arm64"}} {
		archive, digest, err := build(t, archs, someFiles...)
		require.NoError(t, err)
		again, _, err := build(t, archs, someFiles...)
		if err != nil || !bytes.Equal(archive, again) {
			t.Errorf("%q: the same input gives another archive (%v)", archs, err)
		}

		l := layout{t, read(t, bytes.NewReader(archive))}
		var i v1.Index
		into(t, l.files["index.json"].Content, &i)
		note := i.Manifests[0].Annotations
		if len(i.Manifests) != 1 || note["io.containerd.image.name"] != imageName || note[v1.AnnotationRefName] != "v1" || i.Manifests[0].Digest.String() != digest {
			t.Errorf("%q: index %+v, digest %s", archs, i, digest)
		}
		dockers, old := l.files["manifest.json"]
		if old != (len(archs) == 1) {
			t.Errorf("%q: manifest.json is there: %v", archs, old)
		}
		if len(archs) > 1 {
			var images v1.Index
			into(t, l.blob(i.Manifests[0]), &images)
			if len(images.Manifests) != len(archs) {
				t.Fatalf("%q: images %+v", archs, images)
			}
			for n, arch := range archs {
				l.checkImage(images.Manifests[n], arch)
			}
			continue
		}
		m := l.checkImage(i.Manifests[0], archs[0])
		var docker []struct {
			Config           string
			RepoTags, Layers []string
		}
		into(t, dockers.Content, &docker)
		if docker[0].Config != oci.Path(m.Config) || docker[0].Layers[1] != oci.Path(m.Layers[1]) || docker[0].RepoTags[0] != imageName {
			t.Errorf("manifest.json %+v", docker)
		}
	}
}

func TestWhatHasNoPlaceInAnImage(t *testing.T) {
	_, _, err := build(t, []string{"amd64"}, tar.Header{Typeflag: tar.TypeFifo, Name: "./pipe", Mode: 0o644})
	if err == nil || !strings.Contains(err.Error(), "pipe: an entry of type '6' has no place in an image") {
		t.Errorf("a FIFO: %v", err)
	}
	complete := options{platforms: []platform{{"amd64", "a", "b"}}, output: "c", name: "d"}
	t.Setenv("SOURCE_DATE_EPOCH", "")
	if _, _, err = run(complete); err == nil || !strings.Contains(err.Error(), "SOURCE_DATE_EPOCH") {
		t.Errorf("no time: %v", err)
	}
	if _, _, err := run(options{output: "c", name: "d"}); err == nil {
		t.Error("nothing is missing")
	}
	for _, value := range []string{"", "amd64", "amd64=root", "=root,binary", "amd64=,binary", "amd64=root,"} {
		if err := complete.addPlatform(value); err == nil {
			t.Errorf("-platform %q is taken", value)
		}
	}
}

// TestTagOfItsOwn: an image that was given no tag has one by its content, so that a new build is a new image, and the one that the
// manifests name.
func TestTagOfItsOwn(t *testing.T) {
	seen := map[string]bool{}
	for _, content := range []string{"one", "two", "one"} {
		dir := t.TempDir()
		o := options{
			platforms: []platform{{"amd64", filepath.Join(dir, "root"), filepath.Join(dir, "binary")}},
			output:    filepath.Join(dir, "image.tar"), name: "localhost:5000/np", version: "v1-dirty",
		}
		if err := errors.Join(os.WriteFile(o.platforms[0].root, make([]byte, 1024), 0o644), os.WriteFile(o.platforms[0].binary, []byte(content), 0o644)); err != nil {
			t.Fatal(err)
		}
		t.Setenv("SOURCE_DATE_EPOCH", fmt.Sprint(epoch))
		digest, names, err := run(o)
		if err != nil || len(names) != 2 || names[1] != "localhost:5000/np:latest" || names[0] != "localhost:5000/np:v1-dirty-"+digest[7:15] {
			t.Fatalf("%q, digest %s, %v", names, digest, err)
		}
		seen[names[0]] = true
		archive, err := os.ReadFile(o.output)
		require.NoError(t, err)
		var i v1.Index
		into(t, read(t, bytes.NewReader(archive))["index.json"].Content, &i)
		for n, name := range names {
			if d := i.Manifests[n]; d.Digest.String() != digest || d.Annotations["io.containerd.image.name"] != name {
				t.Errorf("%s: %+v", name, d)
			}
		}
	}
	if len(seen) != 2 {
		t.Errorf("two images have the names %v", seen)
	}
}
