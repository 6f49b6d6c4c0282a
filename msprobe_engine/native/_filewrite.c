/* Many small files without the interpreter lock: what `msprobe_engine.core.io.file_batches` does in Python, with the same results.
 *
 * write_files(directory, jobs)  each job (temporary name, name or None, head, address, nbytes, tail): the bytes of head, of memory
 *   and of tail go into a new file of the temporary name, which then gets its name. Returns one errno per job, 0 for done; of a job
 *   that failed nothing stays.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

enum { LARGE = 1 << 20 };

typedef struct {
    const char *temporary, *name;
    struct iovec parts[3];
    int error;
} Job;

static int write_parts(int fd, struct iovec *parts) {
    int at = 0;
    while (at < 3) {
        if (parts[at].iov_len == 0) {
            at++;
            continue;
        }
        ssize_t done = writev(fd, parts + at, 3 - at);
        if (done < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        while (at < 3 && (size_t)done >= parts[at].iov_len) done -= (ssize_t)parts[at++].iov_len;
        if (at < 3) {
            parts[at].iov_base = (char *)parts[at].iov_base + done;
            parts[at].iov_len -= (size_t)done;
        }
    }
    return 0;
}

static int write_file(int directory, Job *job) {
    int fd = openat(directory, job->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0640);
    if (fd < 0) return errno;
    int large = job->parts[1].iov_len >= LARGE;
    int error = write_parts(fd, job->parts);
#ifdef POSIX_FADV_DONTNEED
    if (large && !error) (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* begins to write it to the disk, see send_off */
#else
    (void)large;
#endif
    if (close(fd) && !error && errno != EINTR) error = errno; /* some file systems say only now that they are full */
    if (!error && job->name && renameat(directory, job->temporary, directory, job->name)) error = errno;
    if (error) unlinkat(directory, job->temporary, 0);
    return error;
}

static PyObject *write_files(PyObject *self, PyObject *args) {
    (void)self;
    int directory;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "iO!:write_files", &directory, &PyList_Type, &list)) return NULL;
    Py_ssize_t n = PyList_Size(list);
    Job *jobs = PyMem_Calloc((size_t)(n ? n : 1), sizeof(Job));
    if (!jobs) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        const char *head, *tail;
        Py_ssize_t head_bytes, tail_bytes;
        unsigned long long address, nbytes;
        PyObject *name;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "yOy#KKy#", &jobs[i].temporary, &name, &head, &head_bytes, &address, &nbytes, &tail,
                              &tail_bytes))
            goto bad;
        if (name != Py_None && PyBytes_AsStringAndSize(name, (char **)&jobs[i].name, NULL)) goto bad; /* refuses a null byte inside */
        jobs[i].parts[0] = (struct iovec){(void *)head, (size_t)head_bytes};
        jobs[i].parts[1] = (struct iovec){(void *)(uintptr_t)address, (size_t)nbytes};
        jobs[i].parts[2] = (struct iovec){(void *)tail, (size_t)tail_bytes};
    }
    /* the jobs hold all objects, and the caller holds the list */
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++) jobs[i].error = write_file(directory, &jobs[i]);
    Py_END_ALLOW_THREADS
    PyObject *errors = PyList_New(n);
    for (Py_ssize_t i = 0; errors && i < n; i++) {
        PyObject *error = PyLong_FromLong(jobs[i].error);
        if (!error || PyList_SetItem(errors, i, error)) Py_CLEAR(errors);
    }
    PyMem_Free(jobs);
    return errors;
bad:
    PyMem_Free(jobs);
    return NULL;
}

static PyMethodDef methods[] = {
    {"write_files", write_files, METH_VARARGS, "write_files(directory, jobs) -> list of errno"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_filewrite", "Many small files.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__filewrite(void) { return PyModule_Create(&module); }
