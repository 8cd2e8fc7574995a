package manifest

import (
	"path/filepath"
	"testing"
)

func TestSeeds(t *testing.T) {
	files, err := filepath.Glob("../../../testdata/seeds/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(err, files)
	}
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			var f findings
			b, err := Load(Config{Path: path, Report: f.report})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("\n%s\n-- \n%s", describe(b), f)
		})
	}
}
