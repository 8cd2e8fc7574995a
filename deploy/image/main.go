// Command image packs a root file system and the nodeproxy binary into an OCI image archive: what "ctr images import",
// "podman load" and "docker load" take. The same input gives the same bytes.
//
// The image has two layers: Debian's packages, which change rarely, and the binary.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"strconv"
	"strings"
	"time"
)

func main() {
	var o options
	flag.StringVar(&o.root, "root", "", "tar archive of the root file system")
	flag.StringVar(&o.binary, "binary", "", "the nodeproxy binary")
	flag.StringVar(&o.output, "output", "", "archive to write")
	flag.StringVar(&o.name, "name", "", "name and tag of the image")
	flag.StringVar(&o.version, "version", "", "version of nodeproxy")
	flag.StringVar(&o.arch, "arch", runtime.GOARCH, "architecture, as Go calls it")
	flag.Parse()
	if err := run(o); err != nil {
		fmt.Fprintf(os.Stderr, "image: %v\n", err)
		os.Exit(1)
	}
}

type options struct {
	root, binary, output, name, version, arch string
	// epoch is the time of the image; no file in it is newer.
	epoch time.Time
}

func run(o options) error {
	if o.root == "" || o.binary == "" || o.output == "" || o.name == "" {
		return errors.New("-root, -binary, -output and -name are all needed")
	}
	seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH, the time of the image in seconds: %w", err)
	}
	o.epoch = time.Unix(seconds, 0).UTC()
	root, err := os.ReadFile(o.root)
	if err != nil {
		return err
	}
	binary, err := os.ReadFile(o.binary)
	if err != nil {
		return err
	}
	rootLayer, err := rootFiles(bytes.NewReader(root), o.epoch)
	if err != nil {
		return fmt.Errorf("%s: %w", o.root, err)
	}
	binaryLayer, err := tarOf([]file{
		{header: tar.Header{Typeflag: tar.TypeDir, Name: "usr/", Mode: 0o755}},
		{header: tar.Header{Typeflag: tar.TypeDir, Name: "usr/bin/", Mode: 0o755}},
		{header: tar.Header{Typeflag: tar.TypeReg, Name: "usr/bin/nodeproxy", Mode: 0o755}, content: binary},
	}, o.epoch)
	if err != nil {
		return err
	}
	archive, err := imageArchive(o, rootLayer, binaryLayer)
	if err != nil {
		return err
	}
	return os.WriteFile(o.output, archive, 0o644)
}

// file is an entry of an archive.
type file struct {
	header  tar.Header
	content []byte
}

// rootFiles reads a root file system and returns it as a layer: in the order of the archive, without device nodes, which
// runtimes make themselves, and without what differs between two runs.
func rootFiles(r io.Reader, epoch time.Time) ([]byte, error) {
	var files []file
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if name == "" || name == "dev" || strings.HasPrefix(name, "dev/") {
			continue
		}
		f := file{header: tar.Header{Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Mode: h.Mode, ModTime: h.ModTime}}
		switch h.Typeflag {
		case tar.TypeDir:
			f.header.Name += "/"
		case tar.TypeReg:
			if f.content, err = io.ReadAll(in); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		case tar.TypeSymlink:
		default:
			return nil, fmt.Errorf("%s: an entry of type %q has no place in an image", name, h.Typeflag)
		}
		files = append(files, f)
	}
	return tarOf(files, epoch)
}

// tarOf writes an archive of which all files belong to root, and none is newer than epoch or, as directories are, of the
// moment at which it was made.
func tarOf(files []file, epoch time.Time) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range files {
		h := f.header
		h.Size = int64(len(f.content))
		if h.Typeflag == tar.TypeDir || h.ModTime.IsZero() || h.ModTime.After(epoch) {
			h.ModTime = epoch
		}
		if err := w.WriteHeader(&h); err != nil {
			return nil, fmt.Errorf("%s: %w", h.Name, err)
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, fmt.Errorf("%s: %w", h.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
