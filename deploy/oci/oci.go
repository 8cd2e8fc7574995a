package oci

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// The media types of an OCI image (OCI image specification 1.1).
const (
	IndexType    = "application/vnd.oci.image.index.v1+json"
	ManifestType = "application/vnd.oci.image.manifest.v1+json"
	ConfigType   = "application/vnd.oci.image.config.v1+json"
	LayerType    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// RefName is the annotation of an entry of index.json that holds a tag.
const RefName = "org.opencontainers.image.ref.name"

// Descriptor refers to content by its digest.
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *Platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Path is where a layout has the content.
func (d Descriptor) Path() string { return "blobs/" + strings.Replace(d.Digest, ":", "/", 1) }

// Platform is what an image runs on.
type Platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

// Manifest is an image for one platform, or an artifact.
type Manifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Config        Descriptor        `json:"config"`
	Layers        []Descriptor      `json:"layers"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

// Index lists manifests: those of an image's platforms, or, as index.json, what is in a layout.
type Index struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Manifests     []Descriptor      `json:"manifests"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

// NewIndex is the index of these manifests.
func NewIndex(manifests ...Descriptor) Index {
	return Index{SchemaVersion: 2, MediaType: IndexType, Manifests: manifests}
}

// Layout is an OCI image layout under way.
type Layout struct{ files []File }

// Add adds a file.
func (l *Layout) Add(name string, content []byte) { l.files = append(l.files, Regular(name, content)) }

// Blob adds content by its digest, unless it is there already, and returns a reference to it.
func (l *Layout) Blob(mediaType string, content []byte) Descriptor {
	d := Descriptor{MediaType: mediaType, Digest: Digest(content), Size: len(content)}
	if !slices.ContainsFunc(l.files, func(f File) bool { return f.Header.Name == d.Path() }) {
		l.Add(d.Path(), content)
	}
	return d
}

// JSON is Blob for a value.
func (l *Layout) JSON(mediaType string, value any) (Descriptor, error) {
	content, err := json.Marshal(value)
	if err != nil {
		return Descriptor{}, err
	}
	return l.Blob(mediaType, content), nil
}

// Archive completes the layout with its index.json.
func (l *Layout) Archive(index Index, epoch time.Time) ([]byte, error) {
	content, err := json.Marshal(index)
	if err != nil {
		return nil, err
	}
	files := append(slices.Clone(l.files),
		Regular("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)),
		Regular("index.json", content))
	return Tar(files, epoch)
}

// Digest is how content is referred to.
func Digest(content []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(content)) }
