package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// The media types of an OCI image (OCI image specification 1.1).
const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type imageConfig struct {
	Created string `json:"created"`
	platform
	Config struct {
		Env        []string          `json:"Env"`
		Entrypoint []string          `json:"Entrypoint"`
		Labels     map[string]string `json:"Labels"`
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
	History []map[string]string `json:"history"`
}

// layout is an OCI image layout under way: a tar archive with content by its digest.
type layout struct{ files []file }

func (l *layout) add(name string, content []byte) {
	l.files = append(l.files, file{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, content})
}

func (l *layout) blob(mediaType string, content []byte) descriptor {
	d := descriptor{MediaType: mediaType, Digest: digest(content), Size: len(content)}
	l.add(blobPath(d), content)
	return d
}

func (l *layout) json(mediaType string, value any) (descriptor, error) {
	content, err := json.Marshal(value)
	if err != nil {
		return descriptor{}, err
	}
	return l.blob(mediaType, content), nil
}

func digest(content []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(content)) }

func blobPath(d descriptor) string { return "blobs/" + strings.Replace(d.Digest, ":", "/", 1) }

// imageArchive makes an OCI image layout of layers, given as tar archives, the lowest first. It also has the manifest.json
// of docker save, which versions of Docker before 25 read.
func imageArchive(o options, layers ...[]byte) ([]byte, error) {
	var l layout
	cfg := imageConfig{Created: o.epoch.Format(time.RFC3339), platform: platform{o.arch, "linux"}}
	cfg.Config.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cfg.Config.Entrypoint = []string{"/usr/bin/nodeproxy"}
	cfg.Config.Labels = map[string]string{
		"org.opencontainers.image.title": "nodeproxy", "org.opencontainers.image.version": o.version,
		"org.opencontainers.image.licenses": "Apache-2.0",
	}
	cfg.RootFS.Type = "layers"
	m := manifest{SchemaVersion: 2, MediaType: manifestType}
	for _, layer := range layers {
		cfg.RootFS.DiffIDs = append(cfg.RootFS.DiffIDs, digest(layer))
		cfg.History = append(cfg.History, map[string]string{"created": cfg.Created, "created_by": "nodeproxy deploy/image"})
		packed, err := compress(layer)
		if err != nil {
			return nil, err
		}
		m.Layers = append(m.Layers, l.blob(layerType, packed))
	}
	var err error
	if m.Config, err = l.json(configType, cfg); err != nil {
		return nil, err
	}
	d, err := l.json(manifestType, m)
	if err != nil {
		return nil, err
	}
	_, tag, _ := strings.Cut(o.name[strings.LastIndex(o.name, "/")+1:], ":")
	d.Platform = &platform{o.arch, "linux"}
	d.Annotations = map[string]string{"io.containerd.image.name": o.name, "org.opencontainers.image.ref.name": tag}
	return l.archive(o, index{SchemaVersion: 2, MediaType: indexType, Manifests: []descriptor{d}}, m)
}

// archive completes the layout.
func (l *layout) archive(o options, i index, m manifest) ([]byte, error) {
	type dockerImage struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	docker := dockerImage{Config: blobPath(m.Config), RepoTags: []string{o.name}}
	for _, layer := range m.Layers {
		docker.Layers = append(docker.Layers, blobPath(layer))
	}
	for _, f := range []struct {
		name  string
		value any
	}{
		{"oci-layout", map[string]string{"imageLayoutVersion": "1.0.0"}},
		{"index.json", i},
		{"manifest.json", []dockerImage{docker}},
	} {
		content, err := json.Marshal(f.value)
		if err != nil {
			return nil, err
		}
		l.add(f.name, content)
	}
	return tarOf(l.files, o.epoch)
}

func compress(content []byte) ([]byte, error) {
	var out bytes.Buffer
	w, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(content); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
