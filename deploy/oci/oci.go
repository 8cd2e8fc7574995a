package oci

import (
	_ "crypto/sha256" // for package digest
	"encoding/json"
	"path"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// Versioned is the version of manifests and indexes.
var Versioned = specs.Versioned{SchemaVersion: 2}

// Path is where a layout has the content of a descriptor.
func Path(d v1.Descriptor) string {
	return path.Join(v1.ImageBlobsDir, d.Digest.Algorithm().String(), d.Digest.Encoded())
}

// NewIndex is the index of these manifests: those of an image's platforms, or, as index.json, what is in a layout.
func NewIndex(manifests ...v1.Descriptor) v1.Index {
	return v1.Index{Versioned: Versioned, MediaType: v1.MediaTypeImageIndex, Manifests: manifests}
}

// Layout is an OCI image layout under way.
type Layout struct{ files []File }

// Add adds a file.
func (l *Layout) Add(name string, content []byte) { l.files = append(l.files, Regular(name, content)) }

// Blob adds content by its digest, unless it is there already, and returns a reference to it.
func (l *Layout) Blob(mediaType string, content []byte) v1.Descriptor {
	d := v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(content), Size: int64(len(content))}
	if !slices.ContainsFunc(l.files, func(f File) bool { return f.Header.Name == Path(d) }) {
		l.Add(Path(d), content)
	}
	return d
}

// JSON is Blob for a value.
func (l *Layout) JSON(mediaType string, value any) (v1.Descriptor, error) {
	content, err := json.Marshal(value)
	if err != nil {
		return v1.Descriptor{}, err
	}
	return l.Blob(mediaType, content), nil
}

// Archive completes the layout with its index.json.
func (l *Layout) Archive(index v1.Index, epoch time.Time) ([]byte, error) {
	content, err := json.Marshal(index)
	if err != nil {
		return nil, err
	}
	files := append(slices.Clone(l.files),
		Regular(v1.ImageLayoutFile, []byte(`{"imageLayoutVersion":"`+v1.ImageLayoutVersion+`"}`)),
		Regular(v1.ImageIndexFile, content))
	return Tar(files, epoch)
}
