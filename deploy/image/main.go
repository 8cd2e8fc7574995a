// Command image packs root file systems and the nodeproxy binary into an OCI image archive: what "ctr images import" and
// "podman load" take. The same input gives the same bytes. It prints the digest of the image and its names.
//
// The image has two layers: Debian's packages, which change rarely, and the binary. For several platforms, it is an index of one
// image each.
package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"nodeproxy/deploy/oci"
)

func main() {
	var o options
	flag.Func("platform", "ARCH=ROOT,BINARY: an architecture, as Go calls it, a tar archive of its root file system, and its nodeproxy; may be repeated", o.addPlatform)
	flag.StringVar(&o.output, "output", "", "archive to write")
	flag.StringVar(&o.name, "name", "", "name of the image; without a tag, it gets two: latest, and the version with the first digits of the digest")
	flag.StringVar(&o.version, "version", "", "version of nodeproxy")
	flag.Parse()
	digest, names, err := run(o)
	if err != nil {
		fmt.Fprintf(os.Stderr, "image: %v\n", err)
		os.Exit(1)
	}
	fmt.Println(digest, strings.Join(names, " "))
}

type options struct {
	platforms             []platform
	output, name, version string
	// epoch is the time of the image; no file in it is newer.
	epoch time.Time
}

type platform struct{ arch, root, binary string }

func (o *options) addPlatform(value string) error {
	arch, files, _ := strings.Cut(value, "=")
	root, binary, found := strings.Cut(files, ",")
	if !found || arch == "" || root == "" || binary == "" {
		return errors.New("want ARCH=ROOT,BINARY")
	}
	o.platforms = append(o.platforms, platform{arch, root, binary})
	return nil
}

// run writes the archive, and returns the digest of the image and the names that it has there.
func run(o options) (string, []string, error) {
	if len(o.platforms) == 0 || o.output == "" || o.name == "" {
		return "", nil, errors.New("-platform, -output and -name are all needed")
	}
	var err error
	if o.epoch, err = oci.Epoch(); err != nil {
		return "", nil, err
	}
	var l oci.Layout
	var images []v1.Descriptor
	var last v1.Manifest
	for _, p := range o.platforms {
		layers, err := layersOf(p, o.epoch)
		if err != nil {
			return "", nil, err
		}
		d, m, err := addImage(&l, o, p.arch, layers)
		if err != nil {
			return "", nil, err
		}
		images, last = append(images, d), m
	}
	named := images[0]
	if len(images) > 1 {
		if named, err = l.JSON(v1.MediaTypeImageIndex, oci.NewIndex(images...)); err != nil {
			return "", nil, err
		}
	}
	names := []string{o.name}
	if !strings.Contains(path.Base(o.name), ":") {
		digits := named.Digest.Encoded()[:8]
		names = []string{fmt.Sprintf("%s:%s-%s", o.name, o.version, digits), o.name + ":latest"}
	}
	if len(images) == 1 {
		if err := addDockers(&l, names, last); err != nil {
			return "", nil, err
		}
	}
	index := oci.NewIndex()
	for _, name := range names {
		_, tag, _ := strings.Cut(path.Base(name), ":")
		d := named
		d.Annotations = map[string]string{"io.containerd.image.name": name, v1.AnnotationRefName: tag}
		index.Manifests = append(index.Manifests, d)
	}
	archive, err := l.Archive(index, o.epoch)
	if err != nil {
		return "", nil, err
	}
	return named.Digest.String(), names, os.WriteFile(o.output, archive, 0o644)
}

// layersOf returns the layers of a platform's image as tar archives, the lowest first.
func layersOf(p platform, epoch time.Time) ([][]byte, error) {
	root, err := os.ReadFile(p.root)
	if err != nil {
		return nil, err
	}
	binary, err := os.ReadFile(p.binary)
	if err != nil {
		return nil, err
	}
	rootLayer, err := rootFiles(bytes.NewReader(root), epoch)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p.root, err)
	}
	binaryLayer, err := oci.Tar([]oci.File{
		{Header: tar.Header{Typeflag: tar.TypeDir, Name: "usr/", Mode: 0o755}},
		{Header: tar.Header{Typeflag: tar.TypeDir, Name: "usr/bin/", Mode: 0o755}},
		{Header: tar.Header{Typeflag: tar.TypeReg, Name: "usr/bin/nodeproxy", Mode: 0o755}, Content: binary},
	}, epoch)
	return [][]byte{rootLayer, binaryLayer}, err
}

// rootFiles reads a root file system and returns it as a layer: in the order of the archive, without device nodes, which
// runtimes make themselves, and without what differs between two runs.
func rootFiles(r io.Reader, epoch time.Time) ([]byte, error) {
	var files []oci.File
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
		f := oci.File{Header: tar.Header{Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Mode: h.Mode, ModTime: h.ModTime}}
		switch h.Typeflag {
		case tar.TypeDir:
			f.Header.Name += "/"
		case tar.TypeReg:
			if f.Content, err = io.ReadAll(in); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		case tar.TypeSymlink:
		default:
			return nil, fmt.Errorf("%s: an entry of type %q has no place in an image", name, h.Typeflag)
		}
		files = append(files, f)
	}
	return oci.Tar(files, epoch)
}

// addImage adds the image of one platform to a layout.
func addImage(l *oci.Layout, o options, arch string, layers [][]byte) (v1.Descriptor, v1.Manifest, error) {
	cfg := v1.Image{
		Created: &o.epoch, Platform: v1.Platform{Architecture: arch, OS: "linux"}, RootFS: v1.RootFS{Type: "layers"},
		Config: v1.ImageConfig{
			Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, Entrypoint: []string{"/usr/bin/nodeproxy"},
			Labels: map[string]string{
				v1.AnnotationTitle: "nodeproxy", v1.AnnotationVersion: o.version, v1.AnnotationLicenses: "Apache-2.0",
			},
		},
	}
	m := v1.Manifest{Versioned: oci.Versioned, MediaType: v1.MediaTypeImageManifest}
	for _, layer := range layers {
		cfg.RootFS.DiffIDs = append(cfg.RootFS.DiffIDs, digest.FromBytes(layer))
		cfg.History = append(cfg.History, v1.History{Created: cfg.Created, CreatedBy: "nodeproxy deploy/image"})
		m.Layers = append(m.Layers, l.Blob(v1.MediaTypeImageLayerGzip, oci.Gzip(layer)))
	}
	var err error
	if m.Config, err = l.JSON(v1.MediaTypeImageConfig, cfg); err != nil {
		return v1.Descriptor{}, m, err
	}
	d, err := l.JSON(v1.MediaTypeImageManifest, m)
	d.Platform = &cfg.Platform
	return d, m, err
}

// addDockers adds the manifest.json of docker save, which "docker load" reads before Docker 25. It knows one platform only.
func addDockers(l *oci.Layout, names []string, m v1.Manifest) error {
	var layers []string
	for _, layer := range m.Layers {
		layers = append(layers, oci.Path(layer))
	}
	content, err := json.Marshal([]any{map[string]any{"Config": oci.Path(m.Config), "RepoTags": names, "Layers": layers}})
	l.Add("manifest.json", content)
	return err
}
