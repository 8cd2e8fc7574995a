package main

import (
	"fmt"
	"io/fs"
	"os"
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
	archive, err := oci.Tar(files, r.epoch)
	if err != nil {
		return err
	}
	packed := oci.Gzip(archive)
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
	archive, err = l.Archive(oci.NewIndex(d), r.epoch)
	if err != nil {
		return err
	}
	return r.write(fmt.Sprintf("nodeproxy-chart-%s.oci.tar", r.version), archive)
}

// chartFiles returns the files of the chart, sorted, with the version and the image of this release in them, and its Chart.yaml.
func (r *release) chartFiles() (files []oci.File, about []byte, err error) {
	lines := map[string][][2]string{
		"Chart.yaml": {
			{"version:", "version: " + r.number()}, {"appVersion:", "appVersion: " + r.version},
			{digestAnnotation + ":", digestAnnotation + ": " + r.digest},
		},
		"values.yaml": {{"repository:", "repository: " + r.image}},
	}
	chart := os.DirFS(r.chart)
	err = fs.WalkDir(chart, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(chart, name)
		if err != nil {
			return err
		}
		text := string(content)
		for _, line := range lines[name] {
			if text, err = substitute(text, line[0], line[1]); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		if name == "Chart.yaml" {
			about = []byte(text)
		}
		files = append(files, oci.Regular("nodeproxy/"+name, []byte(text)))
		return nil
	})
	if err == nil && about == nil {
		err = fmt.Errorf("no Chart.yaml")
	}
	return files, about, err
}

// digestAnnotation is the annotation of the chart with the digest of the image that it is for.
const digestAnnotation = "nodeproxy/image-digest"
