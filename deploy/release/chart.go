package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"sigs.k8s.io/yaml"

	"nodeproxy/deploy/oci"
)

// The media types of a chart in a registry, as Helm reads them.
const (
	chartConfigType = "application/vnd.cncf.helm.config.v1+json"
	chartLayerType  = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
)

// packChart writes the chart twice: as the tarball that Helm installs, and as the artifact that Helm pulls from a registry.
func (r *release) packChart() error {
	files, about, err := r.chartFiles()
	if err != nil {
		return err
	}
	packed, err := oci.Tar(files, r.epoch)
	if err != nil {
		return err
	}
	if packed, err = oci.Gzip(packed); err != nil {
		return err
	}
	if err := r.write(fmt.Sprintf("nodeproxy-%s.tgz", r.number()), packed); err != nil {
		return err
	}

	config, err := yaml.YAMLToJSON(about)
	if err != nil {
		return err
	}
	var l oci.Layout
	d, err := l.JSON(v1.MediaTypeImageManifest, v1.Manifest{
		Versioned: oci.Versioned, MediaType: v1.MediaTypeImageManifest,
		Config: l.Blob(chartConfigType, config),
		Layers: []v1.Descriptor{l.Blob(chartLayerType, packed)},
		Annotations: map[string]string{
			v1.AnnotationTitle: "nodeproxy", v1.AnnotationVersion: r.number(), v1.AnnotationCreated: r.epoch.Format(time.RFC3339),
		},
	})
	if err != nil {
		return err
	}
	d.Annotations = map[string]string{v1.AnnotationRefName: r.number()}
	archive, err := l.Archive(oci.NewIndex(d), r.epoch)
	if err != nil {
		return err
	}
	return r.write(fmt.Sprintf("nodeproxy-chart-%s.oci.tar", r.version), archive)
}

// chartFiles returns the files of the chart, sorted, with the version and the image of this release in them, and its Chart.yaml.
func (r *release) chartFiles() (files []oci.File, about []byte, err error) {
	err = filepath.WalkDir(r.chart, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(r.chart, path)
		if err != nil {
			return err
		}
		text := string(content)
		var with [][2]string
		switch name {
		case "Chart.yaml":
			with = [][2]string{{"version:", "version: " + r.number()}, {"appVersion:", "appVersion: " + r.version}, {digestAnnotation + ":", digestAnnotation + ": " + r.digest}}
		case "values.yaml":
			with = [][2]string{{"repository:", "repository: " + r.image}}
		}
		for _, w := range with {
			if text, err = substitute(text, w[0], w[1]); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		if name == "Chart.yaml" {
			about = []byte(text)
		}
		file := oci.Regular("nodeproxy/"+filepath.ToSlash(name), []byte(text))
		file.Header.ModTime = r.epoch
		files = append(files, file)
		return nil
	})
	if err == nil && about == nil {
		err = fmt.Errorf("no Chart.yaml")
	}
	return files, about, err
}

// digestAnnotation is the annotation of the chart with the digest of the image that it is for.
const digestAnnotation = "nodeproxy/image-digest"
